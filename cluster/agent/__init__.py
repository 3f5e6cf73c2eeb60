"""The agent that every worker runs beside its engine."""
