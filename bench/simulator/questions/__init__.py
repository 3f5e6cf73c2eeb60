"""The questions that the simulator answers. Each is a function of the options that returns rows of figures."""
