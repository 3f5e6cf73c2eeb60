"""HTTP at the level of connections, on both sides of the router: clients' and engines'."""
