"""Training of prefill-only adapters, as a library. `cli/train/` has the command line."""
