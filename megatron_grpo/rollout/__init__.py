"""Generations: which are requested when, and how they are made."""
