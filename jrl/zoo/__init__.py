"""What one paper, one game or one other library needs; found by name, imported by nothing."""
