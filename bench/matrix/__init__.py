"""Compares systems side by side: starts them and runs workloads on them in turn."""
