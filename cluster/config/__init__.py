"""cluster.yaml: its schema and its reader."""
