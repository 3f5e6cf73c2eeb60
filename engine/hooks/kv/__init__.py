"""Bodies of hooks into KV handling of pairs: reserved room, and transfers between engines."""
