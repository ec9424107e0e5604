"""Where prompts come from: files, TFDS, and procedural tasks."""
