"""The systems that are measured."""
