"""Games and tools, one file each."""
