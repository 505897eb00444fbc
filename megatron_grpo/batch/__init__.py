"""From prompts to completions, rewards and advantages, and from there to the ranks."""
