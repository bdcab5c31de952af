"""Sandboxes: run programs that a model wrote."""
