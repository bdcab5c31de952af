"""Functions and classes of a user's own that a recipe names: loaded and checked, as are their results."""
