"""The same run on many ranks."""
