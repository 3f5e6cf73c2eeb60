"""Small random models and adapters, for the demo, the benchmarks and the tests."""
