"""vLLM as a rollout engine: its command line, and our code inside its processes."""
