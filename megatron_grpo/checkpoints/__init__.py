"""Checkpoints of a run: what is in them, when they count, and how they come back."""
