"""Computes what clients of the training service ask for: many adapters on one base model, one thread."""
