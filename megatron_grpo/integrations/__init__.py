"""Environments of other libraries for a run: commands that need those libraries and no torch."""
