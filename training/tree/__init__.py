"""Documents as trees (a trunk with branches), packed into rows."""
