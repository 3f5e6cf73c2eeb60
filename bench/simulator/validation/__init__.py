"""Validates the simulator against a real cluster: measures its curves, and compares a load with its simulation."""
