"""Benchmarks of what adapters cost a GPU while it reads prompts: a profile of an engine, and the kernels alone."""
