"""Files of the user's that a config names, and their processes."""
