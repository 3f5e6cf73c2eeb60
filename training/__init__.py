"""Training of prefill-only adapters; an engine without a command line."""
