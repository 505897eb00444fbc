"""AdamW on float32 master weights, sharded over data-parallel ranks, and its learning rate."""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_grpo.config import OptimizerConfig


def make_optimizer(chunks: Sequence[Any], cfg: OptimizerConfig) -> Any:
    """Megatron's distributed optimizer for DDP-wrapped model chunks with their weights loaded.

    Norms and biases have no weight decay. ``optimizer.step()`` clips gradients to the global norm
    `cfg.max_grad_norm` and returns ``(done, gradient norm before clipping, None)``.
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
        # Only torch's: the fused Adam of Transformer Engine and Apex keeps what Megatron expects.
        if isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW):
            _make_loadable(part)
    return optimizer


def _make_loadable(distributed: Any) -> None:
    """Mend two things that keep Megatron from loading a checkpoint into torch's Adam."""
    # The state exists only after a first step, and loading asks for it before.
    for group in distributed.optimizer.param_groups:
        for parameter in group["params"]:
            distributed.optimizer.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
    # Moments are copied into it by name, and the step, which is loaded apart, is not among them.
    copy_states = distributed._set_main_param_and_optimizer_states

    def copy_all_but_step(model_parameter: Any, tensors: dict[str, Any]) -> None:
        loaded = distributed._get_main_param_and_optimizer_states(model_parameter)
        copy_states(model_parameter, {"step": loaded["step"], **tensors})

    distributed._set_main_param_and_optimizer_states = copy_all_but_step


def make_scheduler(optimizer: Any, cfg: OptimizerConfig, num_steps: int) -> OptimizerParamScheduler:
    """Warm-up from 0 to `lr`, then decay to `min_lr` at `num_steps`.

    ``step(increment=1)`` moves it by one optimizer step.
    """
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=cfg.lr,
        min_lr=cfg.min_lr,
        lr_warmup_steps=cfg.lr_warmup_steps,
        lr_decay_steps=num_steps,
        lr_decay_style=cfg.lr_decay_style,
        start_wd=cfg.weight_decay,
        end_wd=cfg.weight_decay,
        wd_incr_steps=num_steps,
        wd_incr_style="constant",
        # A resumed run may have more steps than the one that saved the schedule: the config rules.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
