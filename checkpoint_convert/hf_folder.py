"""Finds the weights of a Hugging Face folder and checks them against config.json, by headers."""

import re
from collections.abc import Collection, Iterator
from pathlib import Path

from checkpoint_convert.families import FAMILIES
from checkpoint_convert.formats.safetensors_file import ITEM_SIZES, TensorPlace
from checkpoint_convert.formats.weight_files import (
    HEAD,
    check_one_set,
    has_weights,
    located,
    same_values,
)
from checkpoint_convert.hf_config import has_other_towers, read_scheme
from checkpoint_convert.megatron import file_tensors
from checkpoint_convert.quantized.places import with_blocks, with_scales
from checkpoint_convert.quantized.scheme import Mxfp4Scheme, Scheme
from checkpoint_convert.shape import ModelShape
from checkpoint_convert.text_tower import is_of_text, text_name
from parallel import Shape

ADAPTER_FILE = "adapter_config.json"
# Buffers in old checkpoints; their values follow from config.json.
_RECOMPUTED = ".rotary_emb.inv_freq"
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_EMBEDDING = "model.embed_tokens"


def locate_tensors(folder: Path, names: Collection[str] | None = None) -> dict[str, TensorPlace]:
    """Place of every tensor in `folder`: in its single weight file or, without one, in its shards.

    Tensors of a text tower have their names in a text model. Shards without any of `names` are not
    opened. torch.save files are read only without safetensors files. Raises ValueError for a
    missing folder, a folder without weights, a malformed file, and an index that names files
    outside the folder, missing files or missing tensors.
    """
    return located(folder, text_name, None if names is None else names.__contains__)


def other_towers(folder: Path) -> tuple[dict[str, str], dict[str, TensorPlace]]:
    """(stored name of each tensor by its `text_name`, places of tensors outside the text tower).

    Both are empty for a text model.
    """
    if not has_other_towers(folder):
        return {}, {}
    names = {text_name(name): name for name in located(folder, str)}
    others = {name for name in names if not is_of_text(name)}
    return names, locate_tensors(folder, others)


def mtp_tensors(folder: Path, shape: ModelShape) -> dict[str, TensorPlace]:
    """Places of the tensors of untrained multi-token-prediction layers; none without weight files.

    Raises ValueError like `locate_tensors`, and for tensors that cannot be read.
    """
    if not shape.num_mtp_layers or not has_weights(folder):
        return {}
    places = located(folder, text_name, lambda name: _is_of_mtp_layer(name, shape))
    faults: list[str] = []
    if isinstance(scheme := read_scheme(folder), Scheme):
        places, faults = with_scales(places, scheme)
    # After `with_scales`: it would keep the scales of weights that were dropped before.
    if shape.trains_mtp:
        trained = file_tensors(shape)
        places = {name: place for name, place in places.items() if name not in trained}
    faults += [fault for each in places.items() for fault in _faults_of_mtp(*each, scheme)]
    if faults:
        raise ValueError(
            f"layers for multi-token prediction in {folder} cannot be read:\n  "
            + "\n  ".join(faults)
        )
    return places


def _faults_of_mtp(
    name: str, place: TensorPlace, scheme: Scheme | Mxfp4Scheme | None
) -> Iterator[str]:
    is_quantized = isinstance(scheme, Scheme) and place.dtype == scheme.dtype
    if not place.shape or not (place.dtype in ITEM_SIZES or is_quantized):
        yield (
            f"{name} {list(place.shape)} has dtype {place.dtype}; it must have a dimension, and "
            f"one of the dtypes {sorted(ITEM_SIZES)}"
        )


def check_weights(
    folder: str | Path, shape: ModelShape, names: Collection[str] | None = None
) -> dict[str, TensorPlace]:
    """Places of exactly the tensors that `shape` requires; reads headers, not weights.

    One exception: if a tied model also stores its head, both tables are read and compared.
    Quantised weights are `QuantizedPlace` or `Mxfp4Place`, without separate entries for scales.
    `names` limits the check to those tensors. Towers other than the text tower are not checked.

    Raises ValueError that lists all tensors that are missing or unexpected or have the wrong shape
    or an unsupported dtype; also for a folder with an adapter or, without `names`, two sets of
    weights.
    """
    folder = Path(folder)
    if (folder / ADAPTER_FILE).is_file():
        raise ValueError(
            f"{folder} has a LoRA adapter, which would be left out: merge it into the weights "
            f"(checkpoint-convert merge), or remove {ADAPTER_FILE}"
        )
    wanted = file_tensors(shape)
    if names is not None:
        wanted = {name: size for name, size in wanted.items() if name in names}
    scheme, has_others = read_scheme(folder), has_other_towers(folder)
    places, faults = _with_scales(folder, names, scheme)
    if names is None:
        check_one_set(folder)
    readable = {*ITEM_SIZES, scheme.dtype} if isinstance(scheme, Scheme) else {*ITEM_SIZES}
    faults += [f"{name} {list(wanted[name])} is missing" for name in wanted if name not in places]
    for name, place in places.items():
        if name not in wanted and has_others and not is_of_text(name):
            continue
        if name not in wanted:
            faults += _faults_of_extra(name, places, shape)
            if _is_of_mtp_layer(name, shape):
                faults += _faults_of_mtp(name, place, scheme)
        elif place.shape != wanted[name]:
            faults.append(
                f"{name} has shape {list(place.shape)}, config.json requires {list(wanted[name])}"
                + _hint_of_shape(place.shape, wanted[name], shape)
            )
        elif place.dtype not in readable:
            faults.append(f"{name} has dtype {place.dtype}, supported: {sorted(ITEM_SIZES)}")
    if faults:
        raise ValueError(
            f"the weights in {folder} do not fit its config.json:\n  " + "\n  ".join(faults)
        )
    return {name: places[name] for name in wanted}


def _hint_of_shape(found: Shape, wanted: Shape, shape: ModelShape) -> str:
    """Explain why a tensor may have another shape than `wanted`."""
    is_stack = shape.moe is not None and shape.moe.stacks == "transposed"
    # `[:-3:-1]`: the last two dimensions, swapped.
    if is_stack and found == (*wanted[:-2], *wanted[:-3:-1]):
        return " (transposes of the published ones, as transformers 5 saves them)"
    return ""


def _with_scales(
    folder: Path, names: Collection[str] | None, scheme: Scheme | Mxfp4Scheme | None
) -> tuple[dict[str, TensorPlace], list[str]]:
    """`locate_tensors` with quantised weights joined to their scales, and the faults of these."""
    if scheme is None:
        return locate_tensors(folder, names), []
    if names is not None:
        names = scheme.stored_names(names)
    located = locate_tensors(folder, names)
    if isinstance(scheme, Mxfp4Scheme):
        return with_blocks(located, scheme)
    return with_scales(located, scheme)


def _faults_of_extra(name: str, places: dict[str, TensorPlace], shape: ModelShape) -> Iterator[str]:
    """Faults of a tensor that `shape` does not include; a copy of the tied embedding has none."""
    if name == HEAD and shape.tie_word_embeddings:
        embedding = FAMILIES[shape.family].file_names.get(_EMBEDDING, _EMBEDDING) + ".weight"
        table = places.get(embedding)
        # vLLM would untie the model, and silently serve an embedding that was never loaded.
        if table is None:
            yield f"{HEAD} is stored without the embedding it is tied to: save it as {embedding}"
        # transformers would untie them: this head is no mere copy.
        elif not same_values(places[name], table):
            yield (
                f"{HEAD} differs from the embedding that config.json ties it to: set "
                "tie_word_embeddings to false"
            )
    elif not (name.endswith(_RECOMPUTED) or _is_of_mtp_layer(name, shape)):
        yield f"{name} {list(places[name].shape)} is not part of the model"


def _is_of_mtp_layer(name: str, shape: ModelShape) -> bool:
    """Whether a tensor belongs to a multi-token-prediction layer: numbered after the last layer, or
    under ``mtp.`` in Qwen's hybrids."""
    if name.startswith("mtp."):
        return shape.num_mtp_layers > 0
    layer = _LAYER.match(name)
    further = range(shape.num_layers, shape.num_layers + shape.num_mtp_layers)
    return layer is not None and int(layer[1]) in further
