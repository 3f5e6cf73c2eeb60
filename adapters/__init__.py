"""Adapters as data and as mathematics: identity, formats, one normal form, what engines read, catalogs."""
