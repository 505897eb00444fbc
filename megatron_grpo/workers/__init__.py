"""User files that a config names, and the processes that run them."""
