"""The tiers that hold adapters: host memory and disk."""
