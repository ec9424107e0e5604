"""Published methods that stand on the seams of ``jrl.methods``, found by name like its own."""
