"""AdamW on float32 master weights, sharded over data-parallel ranks, with its learning rate."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from megatron_grpo.config.train import OptimizerConfig

TORCH_ADAM = torch.optim.Adam | torch.optim.AdamW


def make_optimizer(chunks: Sequence[Any], cfg: OptimizerConfig) -> Any:
    """Megatron's distributed optimizer for DDP-wrapped model chunks with their weights loaded.

    Norms and biases have no weight decay. To step, call `gradient_norm`, then `apply_gradient`: the
    optimizer's own ``step()`` does both, without a chance to look at the norm in between.
    """
    model = chunks[0].config
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=cfg.lr,
            min_lr=cfg.min_lr,
            adam_beta1=cfg.adam_beta1,
            adam_beta2=cfg.adam_beta2,
            adam_eps=cfg.adam_eps,
            weight_decay=cfg.weight_decay,
            clip_grad=cfg.max_grad_norm,
            bf16=model.bf16,
            params_dtype=model.params_dtype,
            use_distributed_optimizer=True,
        ),
        list(chunks),
    )
    for part in optimizer.chained_optimizers:
        if isinstance(part.optimizer, TORCH_ADAM):
            _make_loadable(part.optimizer)
        elif part.optimizer is not None:
            # The fused Adam of Transformer Engine and Apex has the state that Megatron expects, but
            # only from its first step on, and a run may save before taking one.
            part.init_state_fn(part.optimizer, part.config)
    return optimizer


def gradient_norm(optimizer: Any) -> float:
    """Norm of the whole gradient, before clipping; equal on all ranks, which call it together.

    NaN or infinite if a value that enters the norm is, on any rank: see `own_gradient_is_finite`.
    """
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm())


def own_gradient_is_finite(optimizer: Any) -> bool:
    """Whether all gradients that this rank applies are finite, including those not in the norm.

    The norm counts shared parameters once, so it skips norms and routers on tensor ranks above 0,
    and a tied embedding on the last stage. Call between `gradient_norm` and `apply_gradient`.
    """
    gradients = [
        parameter.grad
        for part in optimizer.chained_optimizers
        for parameter in part.get_parameters()
        if parameter.grad is not None
    ]
    return math.isfinite(torch.nn.utils.get_total_norm(gradients))


def state_tensors(optimizer: Any) -> list[Tensor]:
    """The master weights that this rank updates, and what the optimizer keeps of each.

    Without the count of steps, which is not on the GPU.
    """
    return [
        tensor
        for part in optimizer.chained_optimizers
        if part.optimizer is not None
        for group in part.optimizer.param_groups
        for parameter in group["params"]
        for tensor in (
            parameter,
            *(value for name, value in part.optimizer.state[parameter].items() if name != "step"),
        )
    ]


def apply_gradient(optimizer: Any, norm: float) -> None:
    """Update the weights with the gradient, whose norm is `norm`, clipped to `max_grad_norm`."""
    for part in optimizer.chained_optimizers:
        if parameters := part.get_parameters():
            clip_grad_by_total_norm_fp32(parameters, part.config.clip_grad, norm)
    optimizer.step_with_ready_grads()


def steps_taken(optimizer: Any) -> int:
    """Number of updates so far, on which Adam's bias correction depends."""
    counts = [
        int(holder["step"])
        for part in optimizer.chained_optimizers
        for holder in (*part.optimizer.param_groups, *part.optimizer.state.values())
        if "step" in holder
    ]
    return max(counts, default=0)


def set_steps_taken(optimizer: Any, num_steps: int) -> None:
    """Restore `steps_taken`.

    The optimizer's own ``load_state_dict`` would do it too, but Transformer Engine's allocates new
    moments while the old ones are alive.
    """
    for part in optimizer.chained_optimizers:
        if isinstance(part.optimizer, TORCH_ADAM):
            for state in part.optimizer.state.values():
                state["step"].fill_(num_steps)
        else:
            for group in part.optimizer.param_groups:
                group["step"] = num_steps


def _make_loadable(adam: torch.optim.Optimizer) -> None:
    """Make the state of torch's Adam, which would exist only after a first step.

    Loading a checkpoint needs it before.
    """
    for group in adam.param_groups:
        for parameter in group["params"]:
            adam.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def make_scheduler(optimizer: Any, cfg: OptimizerConfig, num_steps: int) -> OptimizerParamScheduler:
    """Warm-up from 0 in the first step to `lr`, and a decay to `min_lr` after `num_steps`.

    ``step(increment=1)`` advances it by one optimizer step.
    """
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=cfg.lr,
        min_lr=cfg.min_lr,
        lr_warmup_steps=cfg.lr_warmup_steps,
        lr_decay_steps=num_steps,
        lr_decay_style=cfg.lr_decay_style,
        wsd_decay_steps=cfg.lr_wsd_decay_steps,
        lr_wsd_decay_style=cfg.lr_wsd_decay_style,
        start_wd=cfg.weight_decay,
        end_wd=cfg.weight_decay,
        wd_incr_steps=num_steps,
        wd_incr_style="constant",
        # A resumed run may have more steps than the one that saved the schedule: take the config's.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
