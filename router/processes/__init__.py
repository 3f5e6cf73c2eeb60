"""Several processes of one router on one port: their supervisor, and what they tell each other."""
