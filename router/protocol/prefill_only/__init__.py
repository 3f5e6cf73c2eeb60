"""Prefill-only requests: the engine requests for them, and the conversion of engines' answers."""
