"""Everything on disk: checkpoints, the run directory and its lock, metrics and their sinks."""
