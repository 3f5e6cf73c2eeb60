"""Reports of a load: on the terminal, as a page, as a comparison."""
