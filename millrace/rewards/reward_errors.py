"""The error of rewards with invalid settings."""

from __future__ import annotations


class RewardError(ValueError):
    """The settings of a reward are invalid, so it cannot score; the message names the fix."""
