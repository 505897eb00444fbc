"""Probe: checks before the first rollout that engines and trainer compute the same model.

Checksums show equal weights. They cannot show that both sides rotate, scale and normalise alike: an
engine given by address may have been started with another RoPE scaling or temperature rule, and a
kernel may be wrong on some device. The probe samples a few tokens for the first prompts and
compares their log-probabilities with the trainer's.
"""

import asyncio
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from megatron_grpo.batch.distribute import Minibatches
from megatron_grpo.batch.experience import Experience
from megatron_grpo.batch.prepare import Preparation
from megatron_grpo.config.config import Config
from megatron_grpo.data.samples import Sample
from megatron_grpo.engine_weights.layouts import quantized_engine
from megatron_grpo.engines.group import CompletionGroup, features_of, sample_alone
from megatron_grpo.policy.forward import compute_logprobs
from megatron_grpo.policy.quantized import quantized_weights
from megatron_grpo.rollout.services import RolloutServices
from parallel.words import counted

BOUNDS = {"float32": 1e-2, "bfloat16": 0.15}
"""Largest allowed mean absolute difference of log-probabilities, in nats, by `model.dtype`.

Two correct implementations differ only by rounding: by less than 1e-5 in float32; in bfloat16 by
1.4e-2 on average and 9e-2 at most, or 0.9 at most with experts, where rounding can send a token to
another expert. The bounds leave a factor of ten over the average, for deeper models and expert
flips. Wrong weights or positions differ by more: stale prefixes alone by 4 to 5.
"""
QUANTIZED_BOUND = 0.6
"""Bound for quantised engines, with the trainer's weights quantised alike. 8-bit weights send more
tokens to other experts: 0.22 on average with random routers and FP8 per row, while wrong weights
differ by 3 (tests/megatron_grpo/engines/test_vllm_worker.py)."""

PROBE_LENGTH = 8
"""Most sampled tokens of each sample."""


@dataclass(frozen=True)
class Gap:
    """Absolute difference of log-probabilities over the tokens of the probe, in nats."""

    mean: float
    largest: float


def sample_probe(services: RolloutServices, policy_version: int) -> Experience:
    """Sample a few tokens for the first prompts, without scores; equal in all runs of a config."""
    samples = services.loop.call(_sample(services, policy_version))
    nothing = torch.zeros(len(samples), dtype=torch.float64)
    return Experience(samples, [], nothing, nothing.long(), nothing)


async def _sample(services: RolloutServices, policy_version: int) -> list[Sample]:
    prompts, router = services.stream.batch(0), services.eval_router
    features = await features_of(prompts)
    length = min(PROBE_LENGTH, services.params.max_completion_length)
    params = replace(services.params, policy_version=policy_version, max_completion_length=length)
    groups = [
        CompletionGroup(
            prompt,
            replace(params, position=position),
            position * params.num_generations,
            features.get(prompt.images),
        )
        for position, prompt in enumerate(prompts)
    ]
    sampling = [asyncio.create_task(group.sample(router)) for group in groups]
    try:
        samples = await sample_alone(router, sampling, policy_version)
    finally:
        for task in sampling:
            task.cancel()
    # "length" would let grpo.overlong_filter mask the samples, which are short on purpose.
    return [replace(sample, finish_reason="stop") for sample in samples]


def probe_logprobs(experience: Experience | None, preparation: Preparation) -> dict[str, float]:
    """Metrics of the differences between engines and trainer, on every rank; collective.

    Rank 0 holds the `experience` of the probe. For quantised engines the difference is also
    measured with the trainer's weights quantised alike: the rest has another cause.

    Rank 0 raises ValueError if the mean difference is beyond `BOUNDS`, or with quantised engines
    beyond `rollout.max_quantization_gap` without a correction. The other ranks continue, and then
    wait for rank 0.
    """
    policy, cfg = preparation.policy, preparation.cfg
    minibatches = preparation.packed(experience, 0)
    gap = same = _gap(minibatches, preparation)
    metrics = {"probe/logprob_gap_mean": gap.mean, "probe/logprob_gap_max": gap.largest}
    model = quantized_engine(cfg.rollout, policy.shape, cfg.model.dtype)
    # With quantization_aware, the first `_gap` has already computed with quantised weights.
    if model and not cfg.rollout.quantization_aware:
        with quantized_weights(policy, model, preparation.groups):
            same = _gap(minibatches, preparation)
        metrics["probe/quantized_logprob_gap_mean"] = same.mean
    if experience:
        _check(cfg, gap, same, len(experience.samples))
    return metrics


def _gap(minibatches: Minibatches, preparation: Preparation) -> Gap:
    groups, temperature = preparation.groups, preparation.cfg.rollout.temperature
    sums = torch.zeros(2, dtype=torch.float64, device=preparation.device)
    largest = torch.zeros(1, dtype=torch.float64, device=preparation.device)
    for minibatch in minibatches:
        computed = compute_logprobs(preparation.policy, minibatch, temperature, groups)
        for batch, (logprobs, _) in zip(minibatch, computed, strict=bool(computed)):
            if batch.loss_mask.any() and groups.answers_for(batch.context_size):
                gaps = (logprobs - batch.rollout_logprobs).abs()[batch.loss_mask].double()
                sums += torch.stack([gaps.sum(), torch.ones_like(gaps).sum()])
                largest = torch.maximum(largest, gaps.max())
    # A sum over tokens, not over all ranks: tensor ranks have counted equal tokens, pipeline stages
    # before the last none.
    groups.reduce_over_tokens(sums)
    groups.reduce_over_tokens(largest, dist.ReduceOp.MAX)
    return Gap(float(sums[0] / sums[1]), float(largest))


def _check(cfg: Config, gap: Gap, same: Gap, num_samples: int) -> None:
    """Raise ValueError if `same`, or with quantised engines the uncorrected `gap`, is too large."""
    is_quantized = cfg.rollout.quantization != "none"
    bound = QUANTIZED_BOUND if is_quantized else BOUNDS[cfg.model.dtype]
    rounding = f"{cfg.rollout.quantization} and " if is_quantized else ""
    if not same.mean <= bound:  # NaN, too
        raise ValueError(
            "engines and trainer do not compute the same model: over "
            f"{counted(num_samples, 'sample')} their log-probabilities differ by {same.mean:.3g} "
            f"on average, and rounding in {rounding}{cfg.model.dtype} explains at most {bound}. "
            "Were engines in rollout.base_urls started with another model, or with other engine "
            "arguments?"
        )
    most = cfg.rollout.max_quantization_gap
    if is_quantized and not cfg.grpo.corrects_rollouts and not gap.mean <= most:
        raise ValueError(
            f"rollout.quantization {cfg.rollout.quantization}: log-probabilities of engines and "
            f"trainer differ by {gap.mean:.3g} on average ({same.mean:.3g} with the trainer's "
            f"weights quantised alike), and at most {most:g} may stay uncorrected: set "
            "grpo.rollout_importance_sampling_mode=token_truncate, another quantization, or "
            "rollout.max_quantization_gap"
        )
