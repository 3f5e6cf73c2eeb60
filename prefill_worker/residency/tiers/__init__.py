"""Where adapters are kept: host memory, disk."""
