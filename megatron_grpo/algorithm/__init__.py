"""GRPO and related algorithms, as pure functions of tensors."""
