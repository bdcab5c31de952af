"""Errors that several packages raise."""

from __future__ import annotations


class SetupError(ValueError):
    """Settings that fit the schema and not each other or this machine; the message says what to change."""


class CheckpointError(RuntimeError):
    """A checkpoint that is damaged or cannot be written; the message names it."""
