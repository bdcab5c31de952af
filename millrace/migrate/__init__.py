"""Recipes from the configurations of other systems."""
