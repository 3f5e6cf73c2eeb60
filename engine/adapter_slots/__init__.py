"""Adapters inside an engine: loaded, put into slots, applied."""
