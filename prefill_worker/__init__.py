"""Agents of the workers that hold adapters, prefill and unified: residency, cold loads and warming."""
