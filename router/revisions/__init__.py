"""From the name of an adapter to a revision."""
