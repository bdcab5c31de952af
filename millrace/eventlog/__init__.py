"""What happened in a run, and whether it can have happened."""
