"""Helpers of several tests: real ranks, engines, runs, tiny models and the float64 oracle."""
