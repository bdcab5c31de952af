"""Simulation of rollouts on a virtual clock."""
