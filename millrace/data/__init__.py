"""Data: rows to prompts, messages to tokens, tokens to tool calls, and groups to packed batches."""
