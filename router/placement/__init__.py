"""Which worker or pair of workers serves a request."""
