"""Hooks that guard what an engine listens on."""
