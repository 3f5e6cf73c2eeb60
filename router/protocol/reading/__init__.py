"""Requests that only read prompts: what engines are asked, and what their answers become."""
