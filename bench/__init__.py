"""Benchmarks. Each one is a command, `prelude bench …`, that prints its numbers and writes them with --json."""
