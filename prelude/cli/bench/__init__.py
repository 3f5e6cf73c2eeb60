"""`prelude bench …`."""
