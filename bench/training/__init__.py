"""Benchmarks of training: speed, and how far a learning rate carries over ranks."""
