"""The same rollouts on a virtual clock."""
