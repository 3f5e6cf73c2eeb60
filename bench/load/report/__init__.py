"""What is shown of a load: the terminal, a page, a comparison."""
