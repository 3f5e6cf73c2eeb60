"""The control protocol between routers and agents."""
