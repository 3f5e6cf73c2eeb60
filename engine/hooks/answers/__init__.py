"""What an answer holds: the spacing of its calls, its last token, a call that was cut."""
