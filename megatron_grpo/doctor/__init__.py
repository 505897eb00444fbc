"""`megatron-grpo doctor`: checks whether this machine, or each host of a job, can train."""
