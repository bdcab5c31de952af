"""The one error a reward raises, always for a mistake in its settings."""

from __future__ import annotations


class RewardError(ValueError):
    """A reward that cannot judge anything as it is set up; the message says what to change."""
