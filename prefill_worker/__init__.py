"""Agent of the workers that hold adapters: residency, cold loads and pair warming."""
