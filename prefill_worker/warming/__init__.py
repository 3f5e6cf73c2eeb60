"""Warm-up of engines and pairs before they serve requests."""
