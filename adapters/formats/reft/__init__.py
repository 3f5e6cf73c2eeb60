"""ReFT directories: pyreft."""
