"""Health checks of a running run."""
