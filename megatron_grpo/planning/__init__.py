"""What a job will need, before a GPU is booked: integers and formulas, no Megatron-Core, no GPU."""
