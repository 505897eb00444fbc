"""Exports the policy's weights, or its adapters, as a folder for users."""

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from checkpoint_convert.folder import read_json
from checkpoint_convert.formats.safetensors_file import NAMES, create_file
from checkpoint_convert.hf_config import has_other_towers
from checkpoint_convert.hf_export import (
    create_export,
    finish_export,
    shard_bytes_for,
    write_mtp_layers,
    write_weights,
)
from checkpoint_convert.hf_folder import ADAPTER_FILE
from checkpoint_convert.megatron import file_layout, hf_dtypes
from checkpoint_convert.megatron_to_hf import stored_tensors
from checkpoint_convert.peft import ADAPTER_WEIGHTS, tensor_in_whole
from checkpoint_convert.quantized.model import quantized_model
from checkpoint_convert.shape import ModelShape
from checkpoint_convert.text_tower import name_in_whole
from megatron_grpo.config.config import Config
from megatron_grpo.config.file import load_config
from megatron_grpo.policy.lora_targets import peft_tensors, targets_of
from megatron_grpo.policy.model import Policy
from megatron_grpo.policy.optimizer_state import SplitFloats
from megatron_grpo.policy.quantized import quantized_shard, rank_layout
from megatron_grpo.policy.residency import EVERYTHING_STAYS, Residency
from parallel.collectives import raise_first_failure
from parallel.groups import Groups

WRITTEN = "model.safetensors"
"""File that `write_weights` fills; renamed to PEFT's name at the end."""


def export_model(
    folder: Path,
    policy: Policy,
    cfg: Config,
    groups: Groups,
    residency: Residency = EVERYTHING_STAYS,
) -> None:
    """Write the policy as Hugging Face folder `folder`, replacing an older one when complete.

    Of a policy with adapters, write only the adapters, as a folder of PEFT's. Every rank writes its
    own boxes at their offsets in one set of files, without gathering. If any rank has a weight that
    is not finite, raises FloatingPointError on all ranks and writes nothing.
    """
    weights = {name: residency.readable(each) for name, each in policy.saved_parameters().items()}
    raise_first_failure(lambda: check_finite(weights.items(), "exported"), FloatingPointError)
    partial = folder.with_name(folder.name + ".partial")
    if groups.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
    if policy.adapters:
        _write_adapters(partial, policy, weights, cfg)
    else:
        _write_model(partial, policy, weights, cfg, groups)
    if groups.rank == 0:
        finish_export(partial, folder)


def _write_model(
    partial: Path, policy: Policy, weights: Mapping[str, Tensor], cfg: Config, groups: Groups
) -> None:
    """Fill the folder `partial`, which rank 0 has removed; collective over all ranks."""
    layout = policy.layout
    model = quantized_model(
        cfg.train.export_quantization,
        *(policy.shape, NAMES[cfg.model.dtype], cfg.rollout.quantization_ignore),
    )
    if model is not None:
        weights = quantized_shard(weights, layout, model, groups)
        layout = rank_layout(layout, model, groups)
    if groups.rank == 0:
        dims, dtype = groups.dims, getattr(torch, cfg.model.dtype)
        # Writers of one pipeline stage; its other ranks hold copies.
        num_writers = dims.pipeline * max(dims.tensor, dims.expert_tensor * dims.expert)
        shard_bytes = shard_bytes_for(num_writers, policy.shape, dtype)
        create_export(partial, cfg.model.path, policy.shape, dtype, shard_bytes, model)
        _add_end_tokens(partial, policy.shape, cfg.rollout.stop_token_ids)
    dist.barrier()
    files = None if model else file_layout(policy.shape)  # quantised exports stack nothing
    written = torch.tensor(write_weights(partial, layout, weights, groups.rank, files))
    write_mtp_layers(partial, cfg.model.path, policy.shape, groups.rank, groups.dims.world_size)
    dist.all_reduce(written)  # also waits until all ranks have written
    if groups.rank == 0:
        dtypes = hf_dtypes(policy.shape, NAMES[cfg.model.dtype], "F32")
        stored = stored_tensors(policy.shape, dtypes, model)
        wanted = sum(prod(size) for _, size in stored.values())
        assert written == wanted, f"{int(written)} of the model's {wanted} elements were written"


def keep_export(cfg: Config, step: int, *, is_stopped: bool) -> None:
    """Rename `hf` to hf_step_N if the run ended at `step` N, a multiple of `train.export_interval`:
    at its last step, or because a hook stopped it there (`is_stopped`).

    A run that goes on replaces `hf` at its new end. One process calls this, while the run's folder
    still has the config of the earlier end.
    """
    run_dir, interval = cfg.train.run_dir, cfg.train.export_interval
    export = run_dir / "hf"
    if step == 0 or interval is None or step % interval or not export.exists():
        return
    if is_stopped or load_config(run_dir / "config.yaml").train.num_steps == step:
        finish_export(export, run_dir / f"hf_step_{step}")


def _add_end_tokens(folder: Path, shape: ModelShape, stop_token_ids: Sequence[int]) -> None:
    """Add `rollout.stop_token_ids` to the end tokens of the exported generation_config.json."""
    if not stop_token_ids:
        return
    file = folder / "generation_config.json"
    values = read_json(file) if file.is_file() else {}
    values["eos_token_id"] = sorted({*shape.eos_token_ids, *stop_token_ids})
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def check_finite(tensors: Iterable[tuple[str, Tensor | SplitFloats]], what: str) -> None:
    """Raise FloatingPointError with the name of the first tensor that has NaN or infinity.

    `what` ends the message "nothing is ...", such as "exported".
    """
    names, bounds = [], []
    for name, values in tensors:
        # Split floats are finite where their bfloat16 weights are. NaN and infinity show in the
        # minimum or maximum, which need no mask as large as the tensor.
        whole = values.weights if isinstance(values, SplitFloats) else values
        bounds.append(torch.stack(torch.aminmax(whole.detach())).double())
        names.append(name)
    if not bounds:
        return
    # Bounds of tensors in host memory move too. Blocking copies to the first device: on the host,
    # `stack` could read results of the GPU before they arrive.
    bounds = [each.to(bounds[0].device) for each in bounds]
    is_finite = torch.stack(bounds).isfinite().all(dim=1)
    if not is_finite.all():
        name = names[int(is_finite.byte().argmin())]
        raise FloatingPointError(f"{name} is not finite: nothing is {what}")


def _write_adapters(
    partial: Path, policy: Policy, weights: Mapping[str, Tensor], cfg: Config
) -> None:
    """Fill the folder `partial` in PEFT's format, which `peft` and engines load onto the model."""
    assert policy.adapters is not None, "lora.r is not 0"
    tensors, rank = peft_tensors(cfg.lora, policy.shape), dist.get_rank()
    layout, modules = policy.adapters.layout, targets_of(cfg.lora, policy.shape)
    if has_other_towers(cfg.model.path):
        tensors = {tensor_in_whole(name): size for name, size in tensors.items()}
        pieces = [replace(each, tensor=tensor_in_whole(each.tensor)) for each in layout.pieces]
        layout, modules = replace(layout, pieces=tuple(pieces)), [*map(name_in_whole, modules)]
    if rank == 0:
        partial.mkdir()
        dtype = NAMES[cfg.model.dtype]
        create_file(partial / WRITTEN, {name: (dtype, size) for name, size in tensors.items()})
        (partial / ADAPTER_FILE).write_text(_adapter_config(cfg, modules), encoding="utf-8")
    dist.barrier()
    written = torch.tensor(write_weights(partial, layout, weights))
    dist.all_reduce(written)  # also waits until all ranks have written
    if rank == 0:
        wanted = sum(map(prod, tensors.values()))
        assert written == wanted, f"{int(written)} of the adapters' {wanted} elements were written"
        (partial / WRITTEN).rename(partial / ADAPTER_WEIGHTS)


def _adapter_config(cfg: Config, modules: list[str]) -> str:
    """PEFT's adapter_config.json."""
    lora = cfg.lora
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(cfg.model.path),
        "r": lora.r,
        "lora_alpha": lora.lora_alpha,
        "lora_dropout": 0.0,
        "use_rslora": lora.use_rslora,
        "init_lora_weights": lora.init_lora_weights,
        # Full names of all layers: PEFT takes an entry for a suffix, and would match others.
        "target_modules": modules,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    return json.dumps(values, indent=2) + "\n"
