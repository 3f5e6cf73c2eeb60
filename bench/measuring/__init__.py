"""Provenance, other processes' use of the CPU, ratios, result files."""
