"""Pure functions over packed tensors, without configuration, logging or process groups."""
