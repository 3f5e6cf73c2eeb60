"""The simulator against a real cluster: its curves measured from outside, and a load beside its simulation."""
