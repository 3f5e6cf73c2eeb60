"""Resolves adapter names to revisions."""
