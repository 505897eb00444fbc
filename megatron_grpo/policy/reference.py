"""The reference model of the KL penalty: frozen, or updated towards the policy."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import Tensor

from checkpoint_convert import ModelShape
from checkpoint_convert.weights import read_weights
from megatron_grpo.bars import waiting
from megatron_grpo.config.config import Config
from megatron_grpo.config.grpo import GRPOConfig
from megatron_grpo.policy.model import Model, Policy, build_model, unwrapped
from megatron_grpo.policy.router import own_choices
from megatron_grpo.policy.vision import vision_tower
from parallel.groups import Groups


@dataclass(kw_only=True)
class Reference(Model):
    """A model without gradients, sharded like the policy.

    Without adapters it has weights of its own. With adapters it shares the policy's frozen weights,
    and has adapters of its own if it follows the policy.
    """

    grpo: GRPOConfig
    averaged_weights: dict[str, Tensor]
    """Weights that follow the policy, by the names of `saved_parameters`; empty if frozen.

    The parameters themselves, or float32 averages that `follow` rounds to the parameters. Averages
    of adapters are rounded in each `computing`.
    """

    @contextmanager
    def computing(self) -> Iterator[None]:
        """With adapters: turn the policy's chunks into the reference's, and replay no routes."""
        if self.adapters is None:
            yield
            return
        adapters = self.adapters.replaced(self.averaged_weights)
        with adapters, own_choices(map(unwrapped, self.chunks)):
            yield

    def follow(self, policy: Policy, num_steps: int) -> None:
        """Average with the policy's weights, if due after `num_steps` optimizer steps.

        ref <- alpha * policy + (1 - alpha) * ref, the soft update of TR-DPO (arXiv 2404.09656);
        alpha = 1 is its hard update, a copy. Skipped steps count, as in TRL. No communication: a
        rank holds the same boxes of both models.

        With alpha < 1 and bfloat16 weights, the average is kept in float32, at 4 bytes per
        parameter, and rounded to the weights. A bfloat16 average would lose changes below half a
        unit in the last place (1/512 to 1/256 of a weight), and stop up to 0.5 / alpha such units
        away from the policy.
        """
        if not self.averaged_weights or num_steps % self.grpo.ref_model_sync_steps:
            return
        alpha = self.grpo.ref_model_mixup_alpha
        parameters = policy.saved_parameters()
        for name, average in self.averaged_weights.items():
            if not parameters[name].requires_grad:
                continue  # frozen weights are equal already, and averaging could round them away
            average.mul_(1 - alpha).add_(parameters[name].detach(), alpha=alpha)
        self.round_averaged_weights()

    def round_averaged_weights(self) -> None:
        """Set the parameters to the averaged weights, rounded to their dtype."""
        if self.adapters is not None:
            return  # the parameters are the policy's
        parameters = self.parameters()
        for name, mixed in self.averaged_weights.items():
            if mixed.dtype != parameters[name].dtype:  # else they are the same memory
                parameters[name].detach().copy_(mixed)


def reference_of(policy: Policy, cfg: Config, groups: Groups) -> Reference:
    """The reference of a run: the policy's frozen weights if it has adapters, else a new model."""
    if policy.adapters is None:
        return build_reference(cfg, policy.shape, groups)
    copies = {name: values.clone() for name, values in policy.adapters.parameters().items()}
    return Reference(
        shape=policy.shape,
        layout=policy.layout,
        chunks=policy.chunks,
        adapters=policy.adapters,
        grpo=cfg.grpo,
        averaged_weights=_averaged(copies, cfg),
    )


def build_reference(cfg: Config, shape: ModelShape, groups: Groups) -> Reference:
    """Build a reference with the weights of `cfg.model.path`."""
    shape = replace(shape, trains_mtp=False)
    model = build_model(cfg, shape, groups)
    for chunk in model.chunks:
        chunk.requires_grad_(False)
    with waiting(f"reading {cfg.model.path} as the reference", shows=groups.rank == 0) as show:
        read_weights(cfg.model.path, shape, model.layout, model.parameters(), show)
    if shape.vision:
        model.vision = vision_tower(cfg, shape, groups, model.chunks[0])
    averaged = _averaged(model.parameters(), cfg)
    return Reference(**vars(model), grpo=cfg.grpo, averaged_weights=averaged)


def _averaged(parameters: Mapping[str, Tensor], cfg: Config) -> dict[str, Tensor]:
    """Start `Reference.averaged_weights`: empty, float32 copies, or the parameters themselves."""
    if not cfg.grpo.sync_ref_model:
        return {}
    weights = {name: parameter.detach() for name, parameter in parameters.items()}
    if cfg.mixes_in_float32:
        return {name: values.float() for name, values in weights.items()}
    return weights
