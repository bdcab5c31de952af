"""How named tensors move between roles."""
