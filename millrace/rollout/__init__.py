"""What is sampled and what is trained on: staleness, groups, episodes, batches."""
