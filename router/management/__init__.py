"""The HTTP endpoints that manage adapters."""
