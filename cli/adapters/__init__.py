"""`prelude adapters …`."""
