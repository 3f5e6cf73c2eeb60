"""Which adapters there are and what their names stand for."""
