"""Sampling: tokens in, tokens out."""
