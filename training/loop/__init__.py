"""One run: batches, steps, evaluations, checkpoints."""
