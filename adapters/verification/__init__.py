"""Whether an adapter computes the right thing."""
