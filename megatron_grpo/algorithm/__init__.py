"""GRPO and its kin: pure functions of tensors."""
