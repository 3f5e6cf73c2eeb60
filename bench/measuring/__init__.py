"""Load generation, timing and reports."""
