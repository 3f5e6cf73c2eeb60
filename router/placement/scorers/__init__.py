"""Scorers: the cost of choosing a worker for a prompt, in expected seconds to the first token. One per module."""
