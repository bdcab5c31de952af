"""Errors that several packages raise."""

from __future__ import annotations


class SetupError(ValueError):
    """Settings that are valid alone but not together or on this machine; the message names the fix."""


class CheckpointError(RuntimeError):
    """A damaged or unwritable checkpoint; the message names it."""
