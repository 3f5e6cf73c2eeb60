"""Agent of decode workers, which hold no adapters."""
