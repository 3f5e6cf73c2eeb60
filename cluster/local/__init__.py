"""A whole cluster on one machine."""
