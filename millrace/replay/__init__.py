"""Replay a run from its event log, and compare the two."""
