"""New weights, to the engines."""
