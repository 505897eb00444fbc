"""Quantised weights of the policy, for exports, pushes and `quantization_aware` training."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from checkpoint_convert import ModelShape
from checkpoint_convert.formats.safetensors_file import NAMES
from checkpoint_convert.quantized.model import QuantizedModel, quantized_layout, quantized_model
from checkpoint_convert.quantized.shard import Maxima, QuantizedShard
from megatron_grpo.config.config import Config
from megatron_grpo.policy.computed import Computed
from megatron_grpo.policy.model import Policy, build_policy
from parallel import Layout, Sender
from parallel.groups import Groups


def rank_layout(layout: Layout, model: QuantizedModel, groups: Groups) -> Layout:
    """This rank's layout of the quantised model, from its `layout` of the plain model."""
    place = groups.dims.expert_place(groups.coordinates)
    return quantized_layout(layout, model, groups.coordinates.tensor, place.tensor)


def quantized_shard(
    weights: Mapping[str, Tensor], layout: Layout, model: QuantizedModel, groups: Groups
) -> QuantizedShard:
    """Quantise this rank's tensors; collective over the ranks that split a weight."""
    return QuantizedShard(weights, layout, model, lambda maxima: _agree(maxima, model, groups))


@contextmanager
def quantized_weights(policy: Policy, model: QuantizedModel, groups: Groups) -> Iterator[None]:
    """Compute with the policy's weights as quantised engines have them, within the block.

    The plain weights wait in host memory. Collective over the ranks that split a weight.
    """
    weights = policy.parameters()
    merged = policy.adapters.merged(weights) if policy.adapters else weights
    shard = quantized_shard(merged, policy.layout, model, groups)
    kept = {name: weights[name].detach().to("cpu", copy=True) for name in shard.quantized}
    try:
        with torch.no_grad():
            for name in kept:
                values = shard.as_read(name)
                # Engines quantise the sum W + s B A, and the adapter goes on adding s B A: the
                # weight meanwhile is Q(W + s B A) - s B A.
                if policy.adapters and name in policy.adapters.modules:
                    values -= merged[name] - weights[name]
                weights[name].copy_(values)
        yield
    finally:
        with torch.no_grad():
            for name, values in kept.items():
                weights[name].copy_(values)


@dataclass(kw_only=True)
class QuantizedPolicy(Policy):
    """A policy that computes with its weights as quantised engines have them.

    Straight-through estimator (arXiv 1308.3432): the gradient of the quantised weights updates the
    plain weights, which are saved, and quantised anew for each push.
    """

    quantized: QuantizedModel
    groups: Groups

    def computing(self) -> AbstractContextManager[None]:
        return quantized_weights(self, self.quantized, self.groups)

    def as_read(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Weights as readers of a quantised folder have them; collective like `computing`."""
        shard = quantized_shard(weights, self.layout, self.quantized, self.groups)
        return Computed(weights, frozenset(shard.quantized), shard.as_read)


def policy_of(cfg: Config, shape: ModelShape, groups: Groups) -> Policy:
    """Build the policy of a run: a `QuantizedPolicy` if `rollout.quantization_aware`."""
    policy = build_policy(cfg, shape, groups)
    model = quantized_model(
        *(cfg.trained_quantization, shape, NAMES[cfg.model.dtype]),
        cfg.rollout.quantization_ignore,
    )
    if model is None:
        return policy
    return QuantizedPolicy(**vars(policy), quantized=model, groups=groups)


def _agree(maxima: Maxima, model: QuantizedModel, groups: Groups) -> None:
    """Replace each block's maximum by the maximum over all ranks with a part of the weight."""
    for are_experts, group in ((False, groups.tensor), (True, groups.expert_tensor)):
        names = [name for name in maxima if (name in model.experts) == are_experts]
        if not names:
            continue
        together = torch.cat([maxima[name].flatten() for name in names])
        agreed = together.to("cpu")  # over gloo: an export may be made while engines generate
        dist.all_reduce(agreed, dist.ReduceOp.MAX, group)
        parts = agreed.to(together.device).split([maxima[name].numel() for name in names])
        for name, part in zip(names, parts, strict=True):
            maxima[name] = part.view_as(maxima[name])


def quantized_sender(sender: Sender, model: QuantizedModel, groups: Groups) -> Sender:
    """This rank's sender of the quantised model, from its `sender` of the plain model.

    All ranks of a stage hold the scales of the stage's weights, but an expert's scales only ranks
    with a part of the expert.
    """
    dims = groups.dims
    layout = rank_layout(sender.layout, model, groups)
    first = dims.stage_size * groups.coordinates.pipeline
    stage = range(first, first + dims.stage_size)
    expert = dims.expert_place(groups.coordinates).expert
    of_expert = stage[expert * dims.expert_tensor :: dims.expert * dims.expert_tensor]
    of_experts = {model.scale_name(name) for name in model.experts}
    scales = [name for name in layout.shapes if name not in sender.layout.shapes]
    return Sender(
        sender.rank,
        layout,
        {**sender.owners, **{n: of_expert if n in of_experts else stage for n in scales}},
        {**sender.replica_sets, **{n: dims.tensor for n in scales if n not in of_experts}},
    )
