"""Exact solutions of small decision problems, as a reference to test the estimators of `algorithms`.

numpy and scipy only. Nothing here imports `algorithms`, because a reference must not share code with what it
tests; only tests and the command import both.
"""
