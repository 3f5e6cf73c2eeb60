"""The generation of one answer: sequences, attempts, calls to engines."""
