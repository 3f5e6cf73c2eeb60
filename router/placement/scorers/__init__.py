"""What a choice of a prefill worker costs: one scorer per module, each in expected seconds to the first token."""
