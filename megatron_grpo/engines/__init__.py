"""Rollouts: inference engines in their own processes, and the trainer's client for them."""
