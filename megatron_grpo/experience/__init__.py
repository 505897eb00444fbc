"""Prompts to completions, rewards and advantages, and these to the ranks."""
