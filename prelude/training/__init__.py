"""Training of prefill-only adapters, as a library. `prelude/cli/train/` has the command line."""
