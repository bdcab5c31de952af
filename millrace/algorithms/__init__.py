"""Pure functions over packed tensors: no configuration, no logging, no process group."""
