"""How many GPUs of which kind a workload needs, and the settings of its workers. Behind `prelude plan`."""
