"""The error of a plan that cannot be made."""

from __future__ import annotations


class PlanError(ValueError):
    """A model, machine or layout is not supported by the planner; the message names the fix."""
