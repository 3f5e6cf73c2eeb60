"""Adapters whose factors are trained."""
