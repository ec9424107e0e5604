"""Published methods beyond those that practitioners use first; found by name like the others."""
