"""KL divergence between two policies: estimates from sampled tokens, and an adaptive penalty."""

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_grpo.config.grpo import KLEstimator

LOG_BOUND = 20.0
"""Largest log q - log p in k3: e**20 is 5e8, and e**89 is infinite in float32."""
MAX_ERROR = 0.2
"""Bound on the relative error ``kl / target - 1``; larger errors are clipped."""


def kl_estimate(logprobs: Tensor, other_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Per-token estimate of KL(p || q) from tokens drawn from p.

    Schulman, "Approximating KL divergence" (2020), with d = log p - log q:

    - k1: d, unbiased, of either sign. As a loss term its expected gradient is 0; as part of the
      reward, k1 alone gives the gradient of the divergence;
    - k2: d**2 / 2, biased, but as a loss term its gradient is that of the divergence (arXiv
      2510.01555);
    - k3: exp(-d) + d - 1, unbiased and never negative (DeepSeekMath, arXiv 2402.03300, eq. 4),
      with -d clamped to at most 20, as in verl: a token far likelier under q would make the
      gradient of the whole batch infinite. verl also clamps the estimate to 10, where tokens 14
      times as likely under q have no gradient; here they have one.

    `logprobs` and `other_logprobs` are log p and log q of the drawn tokens, in any common shape.
    """
    if estimator == "k1":
        return logprobs - other_logprobs
    if estimator == "k2":
        return (logprobs - other_logprobs) ** 2 / 2
    # With x = -d near 0 the result is x**2 / 2, which exp(x) - 1 - x would round away.
    difference = (other_logprobs - logprobs).clamp(max=LOG_BOUND)
    return torch.expm1(difference) - difference


def adapted_beta(
    beta: float, metrics: Mapping[str, float], target: float, num_completions: int, horizon: int
) -> float:
    """Weight of the KL penalty after a step with these metrics: a proportional controller.

    Ziegler et al., arXiv 1909.08593, section 2.2. `target` and the measured kl are mean divergences
    per token, in nats. With the step's `num_completions`, returns
    ``beta * (1 + clip(kl / target - 1, -0.2, 0.2) * min(1, num_completions / horizon))``

    Returns `beta` if the metrics have no divergence: it was not finite, or no token was counted.
    """
    if "kl" not in metrics or not metrics.get("num_response_tokens"):
        return beta
    error = min(max(metrics["kl"] / target - 1, -MAX_ERROR), MAX_ERROR)
    return beta * (1 + error * min(1.0, num_completions / horizon))
