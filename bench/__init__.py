"""Benchmarks: commands `prelude bench …` that print their numbers and write them with --json."""
