"""HTTP front, admission, placement and exchange of requests."""
