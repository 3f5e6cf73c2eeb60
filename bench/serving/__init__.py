"""Benchmarks of how engines serve: first tokens, what they take of the cores when idle, what streaming costs."""
