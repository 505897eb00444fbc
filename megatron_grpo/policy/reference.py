"""The model that the KL divergence is taken to: frozen, or drawn after the policy."""

from dataclasses import dataclass

from torch import Tensor

from checkpoint_convert import ModelShape
from checkpoint_convert.rank_weights import read_weights
from megatron_grpo.config.config import Config
from megatron_grpo.config.grpo_config import GRPOConfig
from megatron_grpo.policy.model import Model, Policy, build_model
from parallel.groups import Groups


@dataclass(kw_only=True)
class Reference(Model):
    """A model without gradients, with weights of its own, on every rank split like the policy."""

    grpo: GRPOConfig
    mixture: dict[str, Tensor]
    """What is drawn after the policy, by the names of `parameters`; empty when frozen.

    The parameters themselves, or float32 weights that they are the rounding of: see `follow`.
    """

    def follow(self, policy: Policy, num_steps: int) -> None:
        """Mix the policy in, where that is due after `num_steps` optimizer steps.

        ref <- alpha * policy + (1 - alpha) * ref, the soft update of TR-DPO (arXiv 2404.09656);
        with alpha 1 its hard update, a copy. A step that was skipped counts as one, as in TRL.
        Nothing is sent: a rank has the same boxes of both models.

        The mixture is float32. In bfloat16 a change of less than half of the last place is lost,
        that is 1/512 to 1/256 of a weight: the reference would stand still up to 0.5 / alpha last
        places away from the policy. So with alpha below 1 bfloat16 weights are the rounding of a
        mixture that stays beside them, 4 bytes per parameter.
        """
        if not self.mixture or num_steps % self.grpo.ref_model_sync_steps:
            return
        alpha = self.grpo.ref_model_mixup_alpha
        for name, trained in policy.parameters().items():
            self.mixture[name].mul_(1 - alpha).add_(trained.detach(), alpha=alpha)
        self.take_mixture()

    def take_mixture(self) -> None:
        """Have the parameters be the mixture, rounded to their type."""
        parameters = self.parameters()
        for name, mixed in self.mixture.items():
            if mixed.dtype != parameters[name].dtype:  # else they are the same memory
                parameters[name].detach().copy_(mixed)


def build_reference(cfg: Config, shape: ModelShape, groups: Groups) -> Reference:
    """The model of `cfg.model.path` with weights of its own."""
    model = build_model(cfg, shape, groups)
    for chunk in model.chunks:
        chunk.requires_grad_(False)
    read_weights(cfg.model.path, shape, model.layout, model.parameters())
    mixture = {}
    if cfg.grpo.sync_ref_model:
        mixture = {name: parameter.detach() for name, parameter in model.parameters().items()}
    if cfg.mixes_in_float32:
        mixture = {name: values.float() for name, values in mixture.items()}
    return Reference(**vars(model), grpo=cfg.grpo, mixture=mixture)
