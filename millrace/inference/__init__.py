"""Inference engine: tokens in, tokens out."""
