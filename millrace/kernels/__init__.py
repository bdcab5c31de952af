"""Tensors in, tensors out: the arithmetic that costs time, each with a plain twin."""
