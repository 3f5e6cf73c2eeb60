"""Named streams of requests: the same bytes for the same seed, on every system that is compared."""
