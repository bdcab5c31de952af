"""Weight updates from the trainer to samplers."""
