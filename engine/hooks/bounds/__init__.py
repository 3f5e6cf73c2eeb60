"""Hooks that bound what one request may take of an engine: memory for grammars, and the server's event loop."""
