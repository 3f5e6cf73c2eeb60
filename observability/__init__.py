"""The metrics that the code declares."""
