"""Data: rows to prompts, and groups to packed batches."""
