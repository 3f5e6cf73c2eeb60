"""Adapters inside an engine: loading, slots, and the kernels that apply them."""
