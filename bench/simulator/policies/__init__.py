"""Compares one router's placement with common policies, over simple workers: `prelude bench placement`."""
