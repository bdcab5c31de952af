"""Checks of a run that goes on."""
