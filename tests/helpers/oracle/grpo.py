"""An independent GRPO, written as plainly as possible, as a reference for the real code.

It loops over sequences and tokens of padded batches, in one process and float64, and shares nothing
with the code under test. Formulas are written as in the papers, with products of ratios and cases
by the sign of the advantage where the papers have them.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

EPSILON = 1e-4
Group = list[float]
"""Rewards of the completions of one prompt; NaN for one that could not be scored."""


@dataclass(frozen=True, kw_only=True)
class OracleLoss:
    """Hyperparameters of the loss."""

    loss_type: str = "dapo"
    loss_arguments: dict[str, float] = field(default_factory=dict)
    loss_aggregation: str | None = None
    loss_denominator: float | None = None
    importance_sampling_level: str = "token"
    max_completion_length: int = 16
    epsilon: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    top_entropy_quantile: float = 1.0
    entropy_coef: float = 0.0
    beta: float = 0.0
    kl_estimator: str = "k3"
    use_bias_correction_kl: bool = False
    kl_in_reward: bool = False
    rollout_importance_sampling_mode: str | None = None
    rollout_importance_sampling_threshold: float = 2.0
    rollout_importance_sampling_min: float = 0.0
    rollout_rs: str | None = None
    rollout_rs_threshold: float = 2.0
    rollout_rs_threshold_lower: float = 0.5
    off_policy_mask_threshold: float | None = None
    temperature: float | Tensor = 1.0
    """One for all sequences, or [sequences, 1, 1]."""


# --- advantages ---------------------------------------------------------------------------------


def oracle_advantages(
    rewards: list[Group], *, estimator: str = "grpo", scale: str = "group"
) -> list[float]:
    """Advantages of the completions of each group, one flat list; 0 where there is no reward.

    `statistics` computes means and deviations exactly and rounds only the result.
    """
    groups = [[r for r in group if not math.isnan(r)] for group in rewards]
    everything = [r for group in groups for r in group]

    def baseline(r: float, group: Group) -> float:
        if estimator == "reinforce_plus_plus":  # arXiv 2501.03262: the batch is the baseline
            return statistics.mean(everything)
        if estimator == "rloo":  # arXiv 2402.14740: the mean of the other completions
            others = list(group)
            others.remove(r)
            return statistics.mean(others) if others else r
        return statistics.mean(group)  # arXiv 2402.03300, section 4.1.2

    unscaled = [[r - baseline(r, group) for r in group] for group in groups]
    in_batch = everything
    if estimator.startswith("reinforce"):  # normalized over the batch
        in_batch = [a for group in unscaled for a in group]
    result = []
    for with_failed, group, centred in zip(rewards, groups, unscaled, strict=True):
        compared = {"group": group, "batch": in_batch, "none": None}[scale]
        divisor = 1.0 if compared is None else _std(compared) + EPSILON
        found = iter(centred)
        result += [0.0 if math.isnan(r) else next(found) / divisor for r in with_failed]
    return result


def oracle_gdpo_advantages(scores: list[list[list[float]]], weights: list[float]) -> list[float]:
    """GDPO, arXiv 2601.05242: normalize each reward within its group, and their sum over the batch.

    `scores[g][i][f]` is the score that reward function f gave to completion i of group g.
    """
    sums = []
    for group in scores:
        for completion in group:
            total = 0.0
            for f, weight in enumerate(weights):
                column = [other[f] for other in group]
                z = (completion[f] - statistics.mean(column)) / (_std(column) + EPSILON)
                total += weight * z
            sums.append(total)
    return [(s - statistics.mean(sums)) / (_std(sums) + EPSILON) for s in sums]


def oracle_process_advantages(
    groups: list[list[list[tuple[int, float]]]],
    lengths: list[list[int]],
) -> list[list[float]]:
    """Advantages of every token of every completion: DeepSeekMath, arXiv 2402.03300, section 4.1.3.

    `groups[g][i]` lists (index of the last token, reward) for each step of completion i.
    """
    result = []
    for group, group_lengths in zip(groups, lengths, strict=True):
        rewards = [reward for steps in group for _, reward in steps]
        for steps, length in zip(group, group_lengths, strict=True):
            advantages = [0.0] * length
            for t in range(length):
                for end, reward in steps:
                    if end >= t:
                        z = (reward - statistics.mean(rewards)) / (_std(rewards) + EPSILON)
                        advantages[t] += z
            result.append(advantages)
    return result


def _std(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


# --- the loss -----------------------------------------------------------------------------------


def oracle_loss(
    logprobs: list[Tensor],
    advantages: Sequence[float | Sequence[float]],
    cfg: OracleLoss,
    old_logprobs: list[Tensor] | None = None,
    ref_logprobs: list[Tensor] | None = None,
    rollout_logprobs: list[Tensor] | None = None,
    entropies: list[Tensor] | None = None,
    beta: float | None = None,
) -> Tensor:
    """The loss, from one tensor of response log-probabilities per sequence.

    An advantage is a scalar per sequence, or one value per token. Without old log-probabilities,
    the generating policy is the current one. `beta` overrides the KL coefficient of `cfg`.
    """
    beta = cfg.beta if beta is None else beta
    threshold = _entropy_threshold(entropies, cfg)
    per_sequence, bonus, num_chosen = [], torch.zeros((), dtype=torch.float64), 0
    for i, sequence in enumerate(logprobs):
        own = advantages[i]
        s = _Sequence(
            cfg=cfg,
            new=list(sequence),
            old=list(sequence.detach() if old_logprobs is None else old_logprobs[i]),
            rollout=None if rollout_logprobs is None else list(rollout_logprobs[i]),
            advantages=[own] * len(sequence) if isinstance(own, int | float) else list(own),
        )
        terms = []
        for t in range(len(sequence)):
            objective = s.objective(t) * s.stays(t)
            if threshold is not None and entropies[i][t] < threshold:
                objective = objective * 0  # arXiv 2506.01939: forking tokens only
            else:
                num_chosen += 1
                if cfg.entropy_coef:
                    bonus = bonus + entropies[i][t]
            if beta and not cfg.kl_in_reward:
                kl = divergence(s.new[t], ref_logprobs[i][t], cfg.kl_estimator)
                if cfg.use_bias_correction_kl:
                    kl = kl * s.ratio(t)
                objective = objective - beta * kl
            terms.append(-objective)
        per_sequence.append(terms)
    loss = _averaged(per_sequence, cfg)
    return loss - cfg.entropy_coef * bonus / max(num_chosen, 1)


AVERAGES = {
    **dict.fromkeys(["grpo", "sapo", "gmpo"], "sequence"),
    **dict.fromkeys(["dapo", "bnpo", "cispo", "vespo", "sft"], "token"),
    "luspo": "sum",
    "dr_grpo": "constant",
}


def _averaged(per_sequence: list[list[Tensor]], cfg: OracleLoss) -> Tensor:
    everything = [term for terms in per_sequence for term in terms]
    if not everything:
        return torch.zeros((), dtype=torch.float64)
    average = cfg.loss_aggregation or AVERAGES[cfg.loss_type]
    if average == "sequence":  # mean over sequences of the mean over tokens
        return sum(sum(terms) / len(terms) for terms in per_sequence if terms) / len(per_sequence)
    if average == "token":  # mean over all tokens
        return sum(everything) / len(everything)
    if average == "sum":  # mean over sequences of the mean times the length
        return sum(everything) / len(per_sequence)
    constant = cfg.loss_denominator or cfg.max_completion_length
    return sum(everything) / (len(per_sequence) * constant)


def divergence(new: Tensor, ref: Tensor, estimator: str) -> Tensor:
    """The estimators of Schulman (2020) for a token drawn from `new`, with r = ref / new."""
    r = torch.exp(ref) / torch.exp(new)
    if estimator == "k1":
        return -torch.log(r)
    if estimator == "k2":
        return torch.log(r) ** 2 / 2
    r = torch.clamp(r, max=math.exp(20))  # as in verl
    return r - 1 - torch.log(r)


def oracle_sequence_kl(old_logprobs: list[Tensor], ref_logprobs: list[Tensor]) -> list[float]:
    """The KL of each completion that its reward loses, before beta: a sum over its tokens."""
    return [
        math.fsum(float(divergence(o, r, "k1")) for o, r in zip(old, ref, strict=True))
        for old, ref in zip(old_logprobs, ref_logprobs, strict=True)
    ]


def _entropy_threshold(entropies: list[Tensor] | None, cfg: OracleLoss) -> float | None:
    """The entropy from which tokens belong to the top `top_entropy_quantile` of all tokens,
    interpolated between two tokens."""
    if cfg.top_entropy_quantile == 1:
        return None
    ordered = sorted(h.item() for sequence in entropies for h in sequence)
    place = (1 - cfg.top_entropy_quantile) * (len(ordered) - 1)
    below, above = ordered[math.floor(place)], ordered[math.ceil(place)]
    return below + (place - math.floor(place)) * (above - below)


@dataclass(frozen=True, kw_only=True)
class _Sequence:
    """One completion, with scalars for each token."""

    cfg: OracleLoss
    new: list[Tensor]
    old: list[Tensor]
    rollout: list[Tensor] | None
    advantages: list[float]

    def objective(self, t: int) -> Tensor:
        """The objective at token t, times the importance weight of trainer over engine."""
        cfg, a = self.cfg, self.advantages[t]
        if cfg.loss_type == "sft":
            return self.new[t]
        if cfg.loss_type == "vespo":
            return self.vespo(t)
        if cfg.loss_type == "gmpo":
            found = self.geometric_mean(a) * a
        elif cfg.loss_type == "cispo":  # arXiv 2506.13585, eq. 4; without the lower bound
            weight = min(self.ratio(t).item(), cfg.epsilon_high)
            found = weight * a * self.new[t]
        elif cfg.loss_type == "sapo":  # arXiv 2511.20347: sigmoid(tau (r - 1)) 4 / tau
            tau = cfg.sapo_temperature_pos if a > 0 else cfg.sapo_temperature_neg
            found = 4 / (tau * (1 + torch.exp(-tau * (self.ratio(t) - 1)))) * a
        elif cfg.loss_type.endswith(":soft"):  # own_loss.py
            tau, ratios = cfg.loss_arguments["tau"], map(self.token_ratio, range(len(self.new)))
            drift = statistics.mean(ratio.item() for ratio in ratios)
            found = a * drift * torch.tanh(tau * torch.log(self.token_ratio(t))) / tau
        else:
            found = self.clipped(self.ratio(t), a)
        return found * self.rollout_weight(t)

    def token_ratio(self, t: int) -> Tensor:
        return torch.exp(self.new[t]) / torch.exp(self.old[t])

    def ratio(self, t: int) -> Tensor:
        if self.cfg.importance_sampling_level == "token":
            return self.token_ratio(t)
        # GSPO, arXiv 2507.18071, eq. 7: (p_new(sequence) / p_old(sequence)) ** (1 / length)
        ratio = _product([self.token_ratio(u) for u in range(len(self.new))])
        ratio = ratio ** (1 / len(self.new))
        if self.cfg.importance_sampling_level == "sequence":
            return ratio
        # Eq. 14: sg[s] p_new(token) / sg[p_new(token)]
        p = torch.exp(self.new[t])
        return ratio.detach() * p / p.detach()

    def clipped(self, ratio: Tensor, a: float) -> Tensor:
        """PPO's surrogate, case by case: constant where the objective would improve beyond the
        clip. With the dual clip it is also constant where it would worsen beyond delta."""
        if a >= 0:
            return a * torch.clamp(ratio, max=1 + self.cfg.epsilon_high)
        bounded = torch.clamp(ratio, min=1 - self.cfg.epsilon)
        if self.cfg.delta is not None:
            bounded = torch.clamp(bounded, max=self.cfg.delta)
        return a * bounded

    def geometric_mean(self, a: float) -> Tensor:
        """GMPO, arXiv 2507.20673: geometric mean of the ratios, each clipped on the side where the
        objective would improve."""
        ratios = [self.token_ratio(t) for t in range(len(self.new))]
        if a >= 0:
            kept = [torch.clamp(r, max=math.exp(self.cfg.epsilon_high)) for r in ratios]
        else:
            kept = [torch.clamp(r, min=math.exp(-self.cfg.epsilon)) for r in ratios]
        return _product(kept) ** (1 / len(kept))

    def vespo(self, t: int) -> Tensor:
        """VESPO, arXiv 2602.10693: REINFORCE weighted with w**k exp(lambda (1 - w)), where w is the
        product of the sequence's ratios and rollout weights.

        As in the authors' code, each ratio is clamped to exp(+-20), and each rollout weight and w
        to [1e-8, exp(20)].
        """
        cfg, a = self.cfg, self.advantages[t]
        w = 1.0
        for u in range(len(self.new)):
            w *= min(max(self.token_ratio(u).item(), math.exp(-20)), math.exp(20))
            w *= min(max(self.rollout_weight(u), 1e-8), math.exp(20))
        w = min(max(w, 1e-8), math.exp(20))
        k, lam = (
            (cfg.vespo_k_pos, cfg.vespo_lambda_pos)
            if a >= 0
            else (cfg.vespo_k_neg, cfg.vespo_lambda_neg)
        )
        return w**k * math.exp(lam * (1 - w)) * a * self.new[t]

    def rollout_weight(self, t: int) -> float:
        """Probability by the trainer over that by the engine, both with the generating weights,
        truncated or masked; 0 for a token that `rollout_rs` rejects."""
        cfg = self.cfg
        if cfg.rollout_rs is not None:
            ratio = self.rollout_ratio(t, cfg.rollout_rs)
            if ratio < cfg.rollout_rs_threshold_lower or ratio > cfg.rollout_rs_threshold:
                return 0.0
        if cfg.rollout_importance_sampling_mode is None:
            return 1.0
        level, kind = cfg.rollout_importance_sampling_mode.split("_")
        weight = self.rollout_ratio(t, level)
        low, high = cfg.rollout_importance_sampling_min, cfg.rollout_importance_sampling_threshold
        if kind == "truncate":
            return min(max(weight, low), high)
        return weight if low <= weight <= high else 0.0

    def rollout_ratio(self, t: int, level: str) -> float:
        ratios = [
            math.exp(old) / math.exp(rollout)
            for old, rollout in zip(self.old, self.rollout, strict=True)
        ]
        return {
            "token": ratios[t],
            "sequence": math.prod(ratios),
            "geometric": math.prod(ratios) ** (1 / len(ratios)),
        }[level]

    def stays(self, t: int) -> float:
        """DeepSeek-V3.2's off-policy mask, arXiv 2512.02556: 0 for a token of negative advantage in
        a sequence that has become too unlikely under the policy, 1 otherwise."""
        if self.cfg.off_policy_mask_threshold is None or self.advantages[t] >= 0:
            return 1.0
        gaps = [(b - a).item() for a, b in zip(self.new, self.rollout, strict=True)]
        return float(statistics.mean(gaps) <= self.cfg.off_policy_mask_threshold)


def _product(factors: list[Tensor]) -> Tensor:
    result = factors[0]
    for factor in factors[1:]:
        result = result * factor
    return result


# --- on a transformers model --------------------------------------------------------------------


def oracle_logprobs(
    model: Any,
    prompts: list[list[int]],
    completions: list[list[int]],
    temperature: float | Tensor = 1.0,
) -> list[Tensor]:
    """Response log-probabilities of each sequence under a `transformers` causal language model."""
    return oracle_logprobs_and_entropies(model, prompts, completions, temperature)[0]


def oracle_logprobs_and_entropies(
    model: Any,
    prompts: list[list[int]],
    completions: list[list[int]],
    temperature: float | Tensor = 1.0,
) -> tuple[list[Tensor], list[Tensor]]:
    """Log-probability of each response token, and entropy of the distribution it was drawn from.

    Runs one right-padded batch in the dtype of the weights; a model loaded `in_float64` computes
    all of it in float64.
    """
    sequences = [
        prompt + completion for prompt, completion in zip(prompts, completions, strict=True)
    ]
    longest = max(len(sequence) for sequence in sequences)
    input_ids = torch.tensor([s + [0] * (longest - len(s)) for s in sequences])
    attention_mask = torch.tensor([[1] * len(s) + [0] * (longest - len(s)) for s in sequences])
    with in_float64() if model.dtype is torch.float64 else nullcontext():
        logits = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
    everything = torch.log_softmax(logits / temperature, dim=-1)
    logprobs, entropies = [], []
    for i, (prompt, sequence) in enumerate(zip(prompts, sequences, strict=True)):
        rows = everything[i, len(prompt) - 1 : len(sequence) - 1]
        chosen = [row[token] for row, token in zip(rows, sequence[len(prompt) :], strict=True)]
        logprobs.append(torch.stack(chosen) if chosen else everything.new_zeros(0))
        entropies.append(-(rows.exp() * rows).sum(dim=1))
    return logprobs, entropies


class _NoFloat32(TorchFunctionMode):
    """Turns every conversion to float32 into one to float64."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        if func is torch.empty:  # files are read into such tensors
            return func(*args, **named)
        func = Tensor.double if func is Tensor.float else func
        named = {name: _in_float64(value) for name, value in named.items()}
        return func(*map(_in_float64, args), **named)


def _in_float64(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def in_float64() -> Iterator[None]:
    """Compute everything in float64, even routers, norms, RoPE's angles and linear attention, which
    transformers and Megatron-Core keep in float32. Backwards of custom autograd functions stay as
    they are: torch calls them outside of a mode."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _NoFloat32():
            yield
    finally:
        torch.set_default_dtype(default)


def oracle_model_loss(
    model: Any,
    prompts: list[list[int]],
    completions: list[list[int]],
    advantages: Sequence[float | Sequence[float]],
    cfg: OracleLoss,
    old_logprobs: list[Tensor] | None = None,
    ref_logprobs: list[Tensor] | None = None,
    rollout_logprobs: list[Tensor] | None = None,
) -> tuple[float, dict[str, Tensor]]:
    """Loss of a `transformers` model on a padded batch, and each parameter's gradient by name."""
    model.zero_grad(set_to_none=True)
    logprobs, entropies = oracle_logprobs_and_entropies(
        model, prompts, completions, cfg.temperature
    )
    loss = oracle_loss(
        logprobs, advantages, cfg, old_logprobs, ref_logprobs, rollout_logprobs, entropies
    )
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), gradients
