"""Hugging Face decoders with our attention, and the log-probabilities they give."""
