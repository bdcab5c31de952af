"""One decoder on many ranks."""
