"""The router's view of the workers, and its calls to their agents."""
