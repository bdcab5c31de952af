"""Launch the ranks of a distributed run."""
