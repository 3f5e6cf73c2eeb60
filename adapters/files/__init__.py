"""Durable folders, and folders that are swept after a crash."""
