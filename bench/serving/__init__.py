"""Benchmarks of how engines serve: what they take of the cores when idle, and what streaming costs."""
