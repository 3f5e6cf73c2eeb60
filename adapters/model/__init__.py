"""Adapters and base models as data."""
