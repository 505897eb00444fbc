"""A loss as a user would write it; grpo.py has its formula."""

import torch


def soft(ratio, log_ratio, advantages, sequences, *, tau):
    """Log-ratios that saturate, times the mean ratio of the completion."""
    drift = sequences.mean(ratio.detach())
    return -advantages * torch.tanh(tau * log_ratio) / tau * drift, {"drift": drift}
