"""Low-rank adapters as PEFT stores them: names and shapes of their tensors, and their folders."""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoint_convert.folder import check_folder, read_json
from checkpoint_convert.formats.safetensors_file import ITEM_SIZES, TensorPlace, read_header
from checkpoint_convert.hf_folder import ADAPTER_FILE
from checkpoint_convert.text_tower import name_in_whole, text_name
from parallel import Shape
from parallel.words import counted

PEFT_PREFIX = "base_model.model."
"""Prefix of an adapter's tensor names; the name of a module of the model follows."""
WEIGHT = ".weight"
ADAPTER_WEIGHTS = "adapter_model.safetensors"


def a_name(module: str) -> str:
    """The name of A [r, in] of a module such as ``model.layers.0.mlp.up_proj``."""
    return f"{PEFT_PREFIX}{module}.lora_A.weight"


def b_name(module: str) -> str:
    """The name of B [out, r] of a module."""
    return f"{PEFT_PREFIX}{module}.lora_B.weight"


def weight_of(tensor: str) -> str:
    """Map ``base_model.model.X.lora_A.weight`` to ``X.weight``; a weight's name stays."""
    name = tensor.removeprefix(PEFT_PREFIX)
    return name.replace(".lora_A.", ".").replace(".lora_B.", ".")


def tensor_in_whole(name: str) -> str:
    """Map an adapter tensor's name from the text model to the multimodal model."""
    return PEFT_PREFIX + name_in_whole(name.removeprefix(PEFT_PREFIX))


def _tensor_of_text(name: str) -> str:
    """Inverse of `tensor_in_whole`; names of a text model stay."""
    return PEFT_PREFIX + text_name(name.removeprefix(PEFT_PREFIX))


def adapter_tensors(
    modules: Iterable[str], rank: int, weights: Mapping[str, Shape]
) -> dict[str, Shape]:
    """Name and shape of every tensor of adapters of `rank`; `weights` has the model's shapes."""
    return {
        name: size
        for module in modules
        for name, size in {
            a_name(module): (rank, weights[module + WEIGHT][1]),
            b_name(module): (weights[module + WEIGHT][0], rank),
        }.items()
    }


@dataclass(frozen=True)
class StoredAdapter:
    """An adapter in a folder: W + scale * B A for each of `modules`."""

    rank: int
    scale: float
    modules: tuple[str, ...]
    places: Mapping[str, TensorPlace]
    """Places of A and B, by PEFT's names for the text model."""


def read_adapter(folder: Path, weights: Mapping[str, Shape]) -> StoredAdapter:
    """Read an adapter from a PEFT folder; of its weights, only the header.

    Raises ValueError, listing the faults, unless it is a plain low-rank adapter of linear layers of
    the model with these `weights`, on exactly the modules that its config names.
    """
    check_folder(folder)
    for name in (ADAPTER_FILE, ADAPTER_WEIGHTS):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} has no {name}: give a folder that PEFT has saved")
    config = read_json(folder / ADAPTER_FILE)
    faults = [*_faults_of_config(config)]
    if faults:
        raise ValueError(f"the adapter in {folder} is of a kind that is not supported: {faults[0]}")
    rank, alpha = config["r"], config.get("lora_alpha", 8)  # 8: PEFT's default
    header = read_header(folder / ADAPTER_WEIGHTS)
    places = {_tensor_of_text(name): place for name, place in header.items()}
    modules = [*dict.fromkeys(weight_of(name).removesuffix(WEIGHT) for name in places)]
    unknown = [module for module in modules if module + WEIGHT not in weights]
    if unknown:
        raise ValueError(
            f"the adapter in {folder} is of another model: the base has no {unknown[0]}"
        )
    wanted = adapter_tensors(modules, rank, weights)
    faults = [f"{name} is missing" for name in wanted if name not in places]
    for name, place in places.items():
        if name not in wanted:
            faults.append(f"{name} is neither A nor B of a layer")
        elif place.shape != wanted[name]:
            faults.append(f"{name} has shape {[*place.shape]} instead of {[*wanted[name]]}")
        elif place.dtype not in ITEM_SIZES:
            faults.append(f"{name} has dtype {place.dtype}, supported: {sorted(ITEM_SIZES)}")
    faults += _faults_of_modules(config, modules, weights)
    if faults:
        raise ValueError(
            f"the adapter in {folder} does not fit the model:\n  " + "\n  ".join(faults)
        )
    # Rank-stabilised LoRA (arXiv 2312.03732) scales by alpha / sqrt(r).
    divisor = math.sqrt(rank) if config.get("use_rslora") else rank
    return StoredAdapter(rank, alpha / divisor, tuple(modules), places)


_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "modules_to_save": (None, []),
    "bias": ("none", None),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "trainable_token_indices": (None, []),
    "target_parameters": (None, []),
    "lora_bias": (False, None),
    "layer_replication": (None, []),
    "use_qalora": (False, None),
    "use_bdlora": (None, False),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
}
"""Values of PEFT's fields for an adapter that is just W + s B A; the first is the default."""


def _faults_of_config(config: Mapping[str, Any]) -> Iterator[str]:
    for key, values in _PLAIN.items():
        if config.get(key, values[0]) not in values:
            yield f"{key} is {config[key]}, and only {values[0]} is supported"
    if not isinstance(config.get("r"), int) or config["r"] < 1:
        yield f"r is {config.get('r')}, and must be 1 or more"
    targets = config.get("target_modules")
    for key in ("target_modules", "exclude_modules"):
        if fault := _fault_of_names(config.get(key)):
            yield f"{key} is {config.get(key)!r}, {fault}"
    if not targets:
        yield f"target_modules is {targets!r}, and must name the layers with adapters"


def _fault_of_names(value: Any) -> str:
    if isinstance(value, str):
        try:
            re.compile(value)
        except re.error as error:
            return f"no regular expression: {error}"
    elif value is not None and not (
        isinstance(value, list) and all(isinstance(name, str) for name in value)
    ):
        return "and must be names of layers or a regular expression"
    return ""


_ALL_LINEAR = "all-linear"
_LAYER = re.compile(r".*?\.layers\.(\d+)\.")
_OPTIONAL = re.compile(r"\.experts\.|\.(gate|router)$")
"""Experts and routers: linear layers only before transformers 5, so they may lack adapters."""


def _faults_of_modules(
    config: Mapping[str, Any], modules: Collection[str], weights: Mapping[str, Shape]
) -> Iterator[str]:
    """Faults where the modules that the config names, by PEFT's rules, differ from `modules`."""
    linears = [n.removesuffix(WEIGHT) for n, s in weights.items() if len(s) == 2 if WEIGHT in n]
    named = {module for module in linears if _is_named(config, module)}
    optional = {module for module in named if _OPTIONAL.search(module)}
    if optional.isdisjoint(modules):
        named -= optional
    if absent := [module for module in linears if module in named and module not in modules]:
        more = f" (nor have {len(absent) - 1} more)" if len(absent) > 1 else ""
        yield f"{absent[0]} has no adapter{more}, and target_modules in {ADAPTER_FILE} names it"
    if further := [module for module in modules if module not in named]:
        yield f"{further[0]} has an adapter, and target_modules in {ADAPTER_FILE} does not name it"
    layers = {int(found[1]) for module in linears if (found := _LAYER.match(module))}
    if beyond := [layer for layer in _chosen_layers(config) if layer not in layers]:
        size = counted(len(layers), "layer")
        yield f"layers_to_transform names layer {beyond[0]}, and the model has {size}"


def _is_named(config: Mapping[str, Any], module: str) -> bool:
    """Whether the config targets a module, under its name in the text or multimodal model."""
    names = {module, name_in_whole(module), f"language_model.{module}"}
    targets, excluded = config["target_modules"], config.get("exclude_modules") or []
    if _fits(excluded, names):
        return False
    if targets == _ALL_LINEAR:
        return _LAYER.match(module) is not None
    if not _fits(targets, names):
        return False
    chosen, layer = _chosen_layers(config), _LAYER.match(module)
    if isinstance(targets, str) or not chosen:
        return True
    return layer is not None and int(layer[1]) in chosen


def _chosen_layers(config: Mapping[str, Any]) -> list[int]:
    chosen = config.get("layers_to_transform")
    return [chosen] if isinstance(chosen, int) else chosen or []


def _fits(targets: str | list[str], names: Iterable[str]) -> bool:
    """Match as PEFT does: a string is a regular expression of the whole name, a list has ends."""
    if isinstance(targets, str):
        return any(re.fullmatch(targets, name) for name in names)
    return any(name == end or name.endswith(f".{end}") for name in names for end in targets)
