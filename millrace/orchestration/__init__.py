"""One run, from recipe to report."""
