"""Teaches adapters that were trained for all positions to live in the prompt."""
