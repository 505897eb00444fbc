"""Checkpoints of a run: their content, when they are complete, and how they are loaded."""
