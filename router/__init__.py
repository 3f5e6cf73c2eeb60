"""The HTTP front of a cluster: validates requests, places them, runs them on workers, relays their output."""
