"""Whole runs: from a base model's directory and files of rows to checkpoints."""
