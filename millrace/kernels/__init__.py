"""Compute kernels: functions from tensors to tensors, each with a plain reference implementation."""
