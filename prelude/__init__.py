"""Serve one large language model with thousands of adapters, applied only while the prompt is read."""
