"""A local page to look into runs: curves, completions, tokens."""
