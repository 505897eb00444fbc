"""The model that is trained: Megatron-Core's, its schedules and its optimizer."""
