"""Real ranks (gloo) in processes of their own, and measures of what they do."""
