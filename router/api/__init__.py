"""The inference endpoints and the status pages."""
