"""`prelude doctor`: what this host has and lacks for serving."""
