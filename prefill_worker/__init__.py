"""Agents of prefill and unified workers, which hold adapters: residency and warm-up."""
