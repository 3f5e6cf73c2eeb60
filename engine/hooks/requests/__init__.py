"""What one request may take of an engine, and what its answer holds: calls, tokens, events."""
