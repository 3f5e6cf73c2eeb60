"""One router's placement beside the usual policies, over simple workers: `prelude bench placement`."""
