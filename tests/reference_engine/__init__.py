"""A reference engine on top of `transformers`."""
