"""Estimates of the KL divergence between two policies from the tokens of one, and its control."""

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_grpo.config.grpo_config import KLEstimator

MAX_ERROR = 0.2
"""Of the divergence against its target, as a share of it: what is beyond changes no more."""


def kl_estimate(logprobs: Tensor, other_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Per-token estimate of KL(p || q) from tokens drawn from p.

    Schulman, "Approximating KL divergence" (2020), with d = log p - log q:

    - k1: d, unbiased, of either sign; as a term of a loss its gradient is 0 on average, and as a
      reward it alone has that of the divergence;
    - k2: d**2 / 2, biased; its gradient is that of the divergence (arXiv 2510.01555);
    - k3: exp(-d) + d - 1, unbiased and never negative (DeepSeekMath, arXiv 2402.03300, eq. 4).

    `logprobs` and `other_logprobs` are log p and log q of the drawn tokens, of any one shape.
    """
    if estimator == "k1":
        return logprobs - other_logprobs
    if estimator == "k2":
        return (logprobs - other_logprobs) ** 2 / 2
    return k3(logprobs, other_logprobs)


def k3(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """The estimate that is unbiased and never negative; see `kl_estimate`."""
    difference = other_logprobs - logprobs
    return torch.expm1(difference) - difference


def beta_after(
    beta: float, metrics: Mapping[str, float], target: float, num_completions: int, horizon: int
) -> float:
    """The weight of the KL penalty after a step of these metrics: see `adapted_beta`.

    It stays where they tell of no divergence: it was not finite, or is a mean over no token.
    """
    if "kl" not in metrics or not metrics.get("num_response_tokens"):
        return beta
    return adapted_beta(beta, metrics["kl"], target, num_completions, horizon)


def adapted_beta(
    beta: float, kl: float, target: float, num_completions: int, horizon: int
) -> float:
    """The weight of the KL penalty after a step that found `kl`: a proportional controller.

    Ziegler et al., arXiv 1909.08593, section 2.2:
    ``beta * (1 + clip(kl / target - 1, -0.2, 0.2) * min(1, num_completions / horizon))``

    Args:
        beta: weight in the step.
        kl: mean divergence per token, in nats.
        target: the one that is wanted.
        num_completions: of the step.
        horizon: completions over which beta changes by 20% at most.
    """
    error = min(max(kl / target - 1, -MAX_ERROR), MAX_ERROR)
    return beta * (1 + error * min(1.0, num_completions / horizon))
