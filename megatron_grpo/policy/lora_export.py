"""The policy's adapters as a folder of PEFT's, which `peft` and engines load onto the model."""

import json
from dataclasses import replace
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist

from checkpoint_convert.formats.hf_folder import ADAPTER_FILE
from checkpoint_convert.formats.safetensors_file import NAMES, create_file
from checkpoint_convert.hf_config import has_other_towers
from checkpoint_convert.hf_export import write_weights
from checkpoint_convert.peft import ADAPTER_WEIGHTS, tensor_in_whole
from checkpoint_convert.text_tower import name_in_whole
from megatron_grpo.config.config import Config
from megatron_grpo.policy.lora_targets import peft_tensors, targets_of
from megatron_grpo.policy.model import Policy

_WRITTEN = "model.safetensors"


def write_adapters(partial: Path, policy: Policy, cfg: Config) -> None:
    """Fill the folder `partial`, which rank 0 has removed; collective over all ranks."""
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
        create_file(partial / _WRITTEN, {name: (dtype, size) for name, size in tensors.items()})
        (partial / ADAPTER_FILE).write_text(_config(cfg, modules))
    dist.barrier()
    written = torch.tensor(write_weights(partial, layout, policy.adapters.parameters()))
    dist.all_reduce(written)  # also waits until all ranks have written
    if rank == 0:
        wanted = sum(map(prod, tensors.values()))
        assert written == wanted, f"{int(written)} of the adapters' {wanted} elements were written"
        (partial / _WRITTEN).rename(partial / ADAPTER_WEIGHTS)


def _config(cfg: Config, modules: list[str]) -> str:
    """PEFT's adapter_config.json. It lists every layer: PEFT reads some names as patterns."""
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
        "target_modules": modules,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    return json.dumps(values, indent=2) + "\n"
