"""Drawing completions: the law, the draw, and the engine of decode slots."""
