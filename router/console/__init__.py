"""A page that shows the cluster to operators: fleet, adapters, requests in flight, and a box to try prompts."""
