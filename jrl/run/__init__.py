"""A run from its configuration to its files: begins, resumes, records, evaluates and ends it."""
