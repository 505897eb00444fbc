"""Floor 2: the GRPO trainer (algorithm, rollouts, data, rewards, loop, command line)."""
