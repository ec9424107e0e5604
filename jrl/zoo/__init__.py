"""Methods, environments and tools that one paper, one game or one other library needs."""
