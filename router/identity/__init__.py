"""Who makes a request, and what that permits."""
