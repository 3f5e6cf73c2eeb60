"""What the router knows about workers, and the calls that it makes to their agents."""
