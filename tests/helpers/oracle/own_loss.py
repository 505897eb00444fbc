"""A loss and advantages as a user would write them; grpo.py has their formulas."""

import torch


def soft(ratio, log_ratio, advantages, sequences, *, tau):
    """Log-ratios that saturate, times the mean ratio of the completion."""
    drift = sequences.mean(ratio.detach())
    return -advantages * torch.tanh(tau * log_ratio) / tau * drift, {"drift": drift}


def beyond_the_median(rewards, group_ids, answer, finish_reasons):
    """Rewards minus their group's median."""
    medians = {int(group): rewards[group_ids == group].nanmedian() for group in group_ids}
    return [reward - medians[int(group)] for reward, group in zip(rewards, group_ids, strict=True)]
