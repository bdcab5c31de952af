"""Rollouts: staleness control, groups, episodes and batches."""
