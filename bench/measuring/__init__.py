"""Provenance, other processes' use of the CPU, result files."""
