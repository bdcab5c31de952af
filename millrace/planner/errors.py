"""The error of a plan that cannot be made."""

from __future__ import annotations


class PlanError(ValueError):
    """A model, machine or layout that cannot be planned for; the message says what to change."""
