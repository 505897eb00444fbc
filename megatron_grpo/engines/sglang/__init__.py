"""SGLang as a rollout engine: its command line, its routes, and our code inside its processes."""
