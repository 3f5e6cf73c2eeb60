"""Bodies of hooks into what a pair does with KV: room for it, and its way from engine to engine."""
