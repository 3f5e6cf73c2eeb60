"""Loads, times and reports."""
