"""What JSON schemas ask for, and what of it the grammar enforces."""
