"""From rows to prompts, and from groups to packed batches."""
