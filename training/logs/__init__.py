"""Logs of a run, with trl's names for metrics."""
