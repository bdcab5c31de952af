"""The event log of a run, and its verification."""
