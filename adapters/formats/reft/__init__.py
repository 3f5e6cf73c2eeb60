"""ReFT directories: pyreft and PreFT."""
