"""AdamW, its learning rate and the order of the data, all of which resume exactly."""
