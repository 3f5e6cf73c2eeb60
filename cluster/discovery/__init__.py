"""Where workers are found, by routers and by other workers: the list of cluster.yaml and DNS."""
