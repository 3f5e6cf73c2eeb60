"""`prelude doctor`: checks whether this host can serve."""
