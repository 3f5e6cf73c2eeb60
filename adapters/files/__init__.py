"""Files and folders that survive crashes, or are removed after them."""
