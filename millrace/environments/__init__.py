"""Environments of episodes with several turns: their kinds, and where they run."""
