"""What pushes carry: the policy's weights, as they are or quantised, or its adapters."""

from collections.abc import Mapping

from torch import Tensor

from megatron_grpo.config.config import Config
from megatron_grpo.engines.layouts import quantized_engine
from megatron_grpo.policy.model import Policy
from megatron_grpo.policy.quantized import quantized_sender, quantized_shard
from parallel import Sender
from parallel.groups import Groups


def pushed_sender(policy: Policy, sender: Sender, cfg: Config, groups: Groups) -> Sender:
    """What this rank can send, if `sender` describes the policy's weights."""
    if policy.adapters and cfg.lora.is_served:
        return policy.adapters.sender
    model = quantized_engine(cfg.rollout, policy.shape, cfg.model.dtype)
    return sender if model is None else quantized_sender(sender, model, groups)


def pushed_weights(policy: Policy, cfg: Config, groups: Groups) -> Mapping[str, Tensor]:
    """The local tensors of `pushed_sender`; collective over all ranks."""
    weights = policy.served(cfg.lora)
    model = quantized_engine(cfg.rollout, policy.shape, cfg.model.dtype)
    if model is None:
        return weights
    return quantized_shard(weights, policy.layout, model, groups)
