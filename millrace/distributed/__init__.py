"""Parallelism: one decoder on many ranks."""
