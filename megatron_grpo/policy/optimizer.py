"""AdamW on float32 master weights, sharded over data-parallel ranks, and its learning rate.

`muon.py` may update matrices in its place.
"""

import math
from collections.abc import Iterable, Sequence, Set
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from megatron_grpo.config.optimizer import OptimizerConfig
from megatron_grpo.policy.optimizer_state import make_loadable, shard_of


def make_optimizer(
    chunks: Sequence[Any], cfg: OptimizerConfig, matrices: Set[Tensor] = frozenset()
) -> Any:
    """Megatron's distributed optimizer for DDP-wrapped model chunks with their weights loaded.

    Tensors of one dimension, such as norms and biases, have no weight decay. To step, call
    `gradient_norm`, then `apply_gradient`: the optimizer's own ``step()`` does both, and nobody
    sees the norm in between. Parameters in `matrices` get Muon's state. Raises the ValueError of
    `check_optimizer`.
    """
    check_optimizer(cfg)
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
            **_memory_fields(cfg),
        ),
        list(chunks),
    )
    for part in optimizer.chained_optimizers:
        if part.optimizer is not None:
            own = matrices & part.model_param_group_index_map.keys()
            make_loadable(part.optimizer, {shard_of(part, matrix) for matrix in own})
    if cfg.optimizer_cpu_offload:
        # Megatron pins copies of whole parameters before it cuts this rank's ranges; torch would
        # keep that pinned memory.
        torch.accelerator.empty_host_cache()
    return optimizer


def check_optimizer(cfg: OptimizerConfig) -> None:
    """Raise ValueError for a key that needs what this host lacks."""
    for key in ("use_precision_aware_optimizer", "optimizer_cpu_offload"):
        if not getattr(cfg, key):
            continue
        if not torch.cuda.is_available():
            raise ValueError(
                f"optimizer.{key} true needs a GPU, and this host has none: leave it out"
            )
        if not find_spec("transformer_engine"):
            raise ValueError(
                f"optimizer.{key} true needs Transformer Engine, which this host lacks: run `bash "
                "requirements/gpu.sh`, or leave it out"
            )


def _memory_fields(cfg: OptimizerConfig) -> dict[str, Any]:
    """Fields of Megatron's config for the keys that save memory."""
    if cfg.optimizer_cpu_offload:
        return {
            # HybridDeviceOptimizer reads `decoupled_grad`, like the precision-aware optimizer.
            "use_precision_aware_optimizer": True,
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": cfg.optimizer_offload_fraction,
        }
    if cfg.use_precision_aware_optimizer:
        return {
            "use_precision_aware_optimizer": True,
            "exp_avg_dtype": getattr(torch, cfg.exp_avg_dtype),
            "exp_avg_sq_dtype": getattr(torch, cfg.exp_avg_sq_dtype),
        }
    return {}


def gradient_norm(optimizer: Any) -> float:
    """Norm of the whole gradient before clipping, equal on all ranks; collective.

    NaN or infinite if a value in the norm is, on any rank. Some gradients are not in the norm: see
    `own_gradient_is_finite`.
    """
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm())


def own_gradient_is_finite(optimizer: Any) -> bool:
    """Whether all gradients that this rank applies are finite, including those not in the norm.

    The norm counts shared parameters once, so it skips norms and routers on tensor ranks above 0,
    and a tied embedding on the last stage. Call between `gradient_norm` and `apply_gradient`.
    """
    found = [
        getattr(
            parameter,
            "decoupled_grad"
            if part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
            else "grad",
            None,
        )
        for part in optimizer.chained_optimizers
        for parameter in part.get_parameters()
    ]
    gradients = [gradient for gradient in found if gradient is not None]
    return math.isfinite(torch.nn.utils.get_total_norm(gradients))


def state_tensors(optimizers: Iterable[Any]) -> list[Tensor]:
    """Master weights that this rank updates, with their moments or momentum.

    Leaves out the count of steps, which is not on the GPU.
    """
    return [
        tensor
        for part in optimizers
        for group in part.optimizer.param_groups
        for parameter in group["params"]
        for tensor in (
            parameter,
            *(value for name, value in part.optimizer.state[parameter].items() if name != "step"),
        )
    ]


def apply_gradient(optimizer: Any, norm: float) -> None:
    """Clip the gradient of norm `norm` to `max_grad_norm`, and update the weights."""
    for part in optimizer.chained_optimizers:
        if parameters := part.get_parameters():
            config = part.config
            is_apart = config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
            clip_grad_by_total_norm_fp32(parameters, config.clip_grad, norm, is_apart)
    optimizer.step_with_ready_grads()
    for part in optimizer.chained_optimizers:
        if on_gpu := getattr(part.optimizer, "gpu_optimizer", None):
            on_gpu.zero_grad()  # Megatron-Core keeps its float32 copies of bfloat16 gradients


def make_scheduler(optimizer: Any, cfg: OptimizerConfig, num_steps: int) -> OptimizerParamScheduler:
    """Warm-up from 0 in the first step to `lr`, and decay to `min_lr` at `num_steps`.

    ``step(increment=1)`` advances the schedule by one optimizer step.
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
        # A resumed run may have more steps than the run that saved the schedule: take the config's
        # number.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
