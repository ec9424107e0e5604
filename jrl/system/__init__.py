"""The process and its machine: signals, waits, memory, devices, compile cache, extras."""
