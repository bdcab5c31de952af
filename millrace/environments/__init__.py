"""Environments that the policy interacts with."""
