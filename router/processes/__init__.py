"""Several processes of one router on one port: their supervisor, and the pages that they ask each other for."""
