"""cluster.yaml: its fields, and how it is read."""
