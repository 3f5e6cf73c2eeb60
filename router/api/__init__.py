"""The HTTP endpoints of inference, and pages about the router."""
