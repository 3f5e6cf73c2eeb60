"""`prelude train …`."""
