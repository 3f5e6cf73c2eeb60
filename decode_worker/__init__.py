"""Agent of the workers that hold no adapter."""
