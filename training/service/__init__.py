"""The training service: the Tinker API, and the log of what its clients asked for."""
