"""GRPO written down once more, as plainly as possible: what the real code is measured against.

Loops over sequences and tokens, padded batches, one process, float64; nothing shared with the code
under test.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class OracleLoss:
    """Hyperparameters of the loss."""

    loss_type: str = "grpo"
    max_completion_length: int = 16
    epsilon: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    beta: float = 0.0
    temperature: float = 1.0


def oracle_advantages(
    rewards: list[list[float]], *, correction: int, epsilon: float
) -> list[float]:
    """(r - mean) / (std + epsilon), group by group; one list per group, one flat list back."""
    advantages = []
    for group in rewards:
        mean = math.fsum(group) / len(group)
        std = math.sqrt(math.fsum((r - mean) ** 2 for r in group) / (len(group) - correction))
        advantages += [(r - mean) / (std + epsilon) for r in group]
    return advantages


def oracle_loss(
    logprobs: list[Tensor],
    advantages: list[float],
    cfg: OracleLoss,
    old_logprobs: list[Tensor] | None = None,
    ref_logprobs: list[Tensor] | None = None,
) -> Tensor:
    """The loss, from one tensor of response log-probabilities per sequence."""
    per_sequence = []
    for i, sequence in enumerate(logprobs):
        terms = []
        for t in range(len(sequence)):
            new, advantage = sequence[t], advantages[i]
            old = new.detach() if old_logprobs is None else old_logprobs[i][t]
            ratio = torch.exp(new - old)
            clipped = ratio.clamp(1 - cfg.epsilon, 1 + cfg.epsilon_high)
            if cfg.delta is not None and ratio > cfg.delta:
                ratio = torch.tensor(cfg.delta, dtype=ratio.dtype)
            objective = torch.min(ratio * advantage, clipped * advantage)
            if cfg.beta:
                log_quotient = ref_logprobs[i][t] - new
                objective = objective - cfg.beta * (torch.exp(log_quotient) - log_quotient - 1)
            terms.append(-objective)
        per_sequence.append(terms)

    everything = [term for terms in per_sequence for term in terms]
    if not everything:
        return torch.zeros((), dtype=torch.float64)
    if cfg.loss_type == "grpo":
        means = [sum(terms) / len(terms) for terms in per_sequence if terms]
        return sum(means) / len(per_sequence)
    if cfg.loss_type == "dapo":
        return sum(everything) / len(everything)
    assert cfg.loss_type == "dr_grpo"
    return sum(everything) / (len(per_sequence) * cfg.max_completion_length)


def oracle_logprobs(
    model: Any, prompts: list[list[int]], completions: list[list[int]], temperature: float = 1.0
) -> list[Tensor]:
    """Response log-probabilities of each sequence under a `transformers` causal language model.

    One right-padded batch. The weights decide the precision (call `model.double()` first), up to
    the norms and rotary embeddings, which transformers computes in float32 whatever the weights.
    """
    sequences = [
        prompt + completion for prompt, completion in zip(prompts, completions, strict=True)
    ]
    longest = max(len(sequence) for sequence in sequences)
    input_ids = torch.tensor([s + [0] * (longest - len(s)) for s in sequences])
    attention_mask = torch.tensor([[1] * len(s) + [0] * (longest - len(s)) for s in sequences])
    logits = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
    everything = torch.log_softmax(logits / temperature, dim=-1)
    result = []
    for i, (prompt, sequence) in enumerate(zip(prompts, sequences, strict=True)):
        chosen = [everything[i, t - 1, sequence[t]] for t in range(len(prompt), len(sequence))]
        result.append(torch.stack(chosen) if chosen else everything.new_zeros(0))
    return result


def oracle_model_loss(
    model: Any,
    prompts: list[list[int]],
    completions: list[list[int]],
    advantages: list[float],
    cfg: OracleLoss,
    old_logprobs: list[Tensor] | None = None,
    ref_logprobs: list[Tensor] | None = None,
) -> tuple[float, dict[str, Tensor]]:
    """Loss of a `transformers` model on a padded batch, and every parameter's gradient by name."""
    model.zero_grad(set_to_none=True)
    logprobs = oracle_logprobs(model, prompts, completions, cfg.temperature)
    loss = oracle_loss(logprobs, advantages, cfg, old_logprobs, ref_logprobs)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), gradients
