"""A run from beginning to end: set-up, records, progress, export."""
