"""From packed batches to new weights, and to disk."""
