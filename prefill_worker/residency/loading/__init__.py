"""How adapters come: from the store, or pushed."""
