"""Systems beside each other: starts them, runs workloads on them in turn, compares them."""
