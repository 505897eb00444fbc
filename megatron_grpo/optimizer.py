"""AdamW on float32 master weights, sharded over data-parallel ranks, and its learning rate."""

from collections.abc import Sequence
from typing import Any

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
    return get_megatron_optimizer(
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
    )
