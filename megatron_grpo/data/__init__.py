"""Prompts, from files or a hub to tokens."""
