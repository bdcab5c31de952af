"""Errors that several packages raise, and a hint for their messages."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


class SetupError(ValueError):
    """Settings that are valid alone but not together or on this machine; the message names the fix."""


class PlanError(ValueError):
    """A model, machine or layout is not supported by the planner; the message names the fix."""


class CheckpointError(RuntimeError):
    """A damaged or unwritable checkpoint; the message names it."""


def did_you_mean(name: str, known: Sequence[str], otherwise: str = "") -> str:
    """Return the known name that resembles an unknown one as a hint; else `otherwise`, or all known names."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else otherwise or f"there are: {', '.join(known)}"
