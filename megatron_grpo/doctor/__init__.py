"""`megatron-grpo doctor`: whether this machine, or each host of a job, can train."""
