"""The HTTP front end of a cluster: validates requests, places them on workers, and relays the workers' output."""
