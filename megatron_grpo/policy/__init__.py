"""The trained model: Megatron-Core's GPTModel with its pipeline schedules and optimizer."""
