"""Checks that an adapter computes the right thing."""
