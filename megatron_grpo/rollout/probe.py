"""Checks once, before the first rollout, that engines and trainer compute the same model.

Checksums show that the weights are the same bytes. They cannot show that both sides rotate, scale
and normalize alike: an engine given by address may have been started with another RoPE scaling or
temperature rule, and a kernel may be wrong on some device. So a few tokens are sampled for the
first prompts of the data, and compared with the trainer's log-probabilities of the same tokens.
"""

import torch
import torch.distributed as dist

from megatron_grpo.batch.experience import Experience
from megatron_grpo.batch.prepare import packed_minibatches
from megatron_grpo.config.config import Config
from megatron_grpo.policy.forward import compute_logprobs
from megatron_grpo.policy.model import Policy
from parallel.groups import Groups
from parallel.microbatches import CostModel

BOUNDS = {"float32": 1e-2, "bfloat16": 0.15}
"""Largest allowed mean absolute difference of log-probabilities, in nats, by `model.dtype`.

Two correct implementations differ only by rounding: by less than 1e-5 in float32; in bfloat16 by
1.4e-2 on average and 9e-2 at most, or 0.9 at most with experts, where rounding can send a token to
another expert. The bounds leave a factor of ten over the average, for deeper models and expert
flips. Wrong weights or positions differ by more: stale prefixes alone by 4 to 5.
"""


def probe_logprobs(
    experience: Experience | None,
    policy: Policy,
    cost: CostModel,
    cfg: Config,
    groups: Groups,
    device: torch.device,
) -> dict[str, float]:
    """Mean and largest absolute difference over the probe's tokens, as metrics, on every rank.

    Collective; rank 0 holds the `experience` of the probe. Only rank 0 raises ValueError when the
    mean is beyond `BOUNDS`; the other ranks continue and then wait for it.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    largest = torch.zeros(1, dtype=torch.float64, device=device)
    for minibatch in packed_minibatches(experience, 0, cost, cfg, groups, device):
        computed = compute_logprobs(policy, minibatch, cfg.rollout.temperature, groups) or []
        for batch, (logprobs, _) in zip(minibatch, computed, strict=bool(computed)):
            if batch.loss_mask.any() and groups.answers_for(batch.context_size):
                gaps = (logprobs - batch.rollout_logprobs).abs()[batch.loss_mask].double()
                sums += torch.stack([gaps.sum(), torch.ones_like(gaps).sum()])
                largest = torch.maximum(largest, gaps.max())
    # Tensor ranks have all counted the same tokens, earlier stages none.
    for group in (groups.data_context, groups.pipeline):
        dist.all_reduce(sums, group=group)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    mean = float(sums[0] / sums[1])
    bound = BOUNDS[cfg.model.dtype]
    if experience and not mean <= bound:
        raise ValueError(
            f"engines and trainer do not compute the same model: over {len(experience.samples)} "
            f"samples their log-probabilities differ by {mean:.3g} on average, and rounding in "
            f"{cfg.model.dtype} explains at most {bound}. Were engines in rollout.base_urls "
            "started with another model, or with other rollout.vllm arguments?"
        )
    return {"probe/logprob_gap_mean": mean, "probe/logprob_gap_max": float(largest)}
