"""Warms engines and pairs before users come."""
