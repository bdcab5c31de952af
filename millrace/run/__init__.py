"""One training run: from a recipe to a run folder."""
