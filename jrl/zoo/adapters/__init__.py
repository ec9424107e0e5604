"""Environments and tools of other libraries, each an extra."""
