"""A run's folder: its checkpoints, each an adapter that `prelude adapters import` takes as it is."""
