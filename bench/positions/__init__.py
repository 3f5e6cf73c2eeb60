"""Adapters of all positions and of the prompt alone, on six kinds of task: `prelude bench positions`."""
