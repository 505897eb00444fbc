"""Held-out prompts."""
