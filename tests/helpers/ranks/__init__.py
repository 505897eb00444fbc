"""Real ranks (gloo) in separate processes, and counters of their work."""
