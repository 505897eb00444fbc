"""What several tests share: real ranks, engines, runs, tiny models and the float64 oracle."""
