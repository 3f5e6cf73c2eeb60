"""A simulated fleet: real placement and real bookkeeping, simulated workers and time."""
