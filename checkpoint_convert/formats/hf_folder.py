"""The weight files of a Hugging Face folder: locates and checks tensors from file headers."""

import re
from collections.abc import Callable, Collection, Iterator
from os.path import isfile  # false also for names that no file can have
from pathlib import Path
from typing import TypeVar

from checkpoint_convert.families import FAMILIES
from checkpoint_convert.folder import check_folder, read_json
from checkpoint_convert.formats.safetensors_file import (
    INDEX_FILE,
    ITEM_SIZES,
    SINGLE_FILE,
    TensorPlace,
    read_header,
)
from checkpoint_convert.hf_config import has_other_towers, read_scheme
from checkpoint_convert.megatron import file_tensors
from checkpoint_convert.mxfp4 import Mxfp4Scheme, with_blocks
from checkpoint_convert.quantization import Scheme
from checkpoint_convert.quantized_place import with_scales
from checkpoint_convert.shape import ModelShape
from checkpoint_convert.text_tower import is_of_text, text_name
from parallel import Shape

BIN_FILE = "pytorch_model.bin"
BIN_INDEX_FILE = "pytorch_model.bin.index.json"
ADAPTER_FILE = "adapter_config.json"
_NO_WEIGHTS = ("training_args.bin", "optimizer.bin")
"""How the names of `.bin` files end that vLLM and SGLang do not read."""
# Buffers in old checkpoints; their values follow from config.json.
_RECOMPUTED = ".rotary_emb.inv_freq"
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_EMBEDDING, _HEAD = "model.embed_tokens", "lm_head.weight"

T = TypeVar("T")


def locate_tensors(folder: Path, names: Collection[str] | None = None) -> dict[str, TensorPlace]:
    """Place of every tensor in `folder`: in its single weight file or, without one, in its shards.

    Tensors of a text tower have the names that they have in a model of text.
    `names` limits the result to those tensors; shards without any of them are not opened.
    torch.save files are read when there are no safetensors files. Raises ValueError if `folder` is
    not a folder or has neither kind of file, if the index names files outside the folder, missing
    files or missing tensors, and for malformed files.
    """
    is_wanted = _any if names is None else names.__contains__
    return _located(folder, is_wanted, text_name)


def _any(name: str) -> bool:
    return True


def _located(
    folder: Path, is_wanted: Callable[[str], bool], rename: Callable[[str], str]
) -> dict[str, TensorPlace]:
    check_folder(folder)
    for single, index, read in (
        (SINGLE_FILE, INDEX_FILE, read_header),
        (BIN_FILE, BIN_INDEX_FILE, _read_places),
    ):
        if (folder / single).is_file():
            return _chosen(_renamed(read(folder / single), rename), is_wanted)
        if (folder / index).is_file():
            return _locate_indexed(folder / index, read, is_wanted, rename)
    raise ValueError(
        f"{folder} has no weights: none of {SINGLE_FILE}, {INDEX_FILE}, {BIN_FILE} and "
        f"{BIN_INDEX_FILE} is there"
    )


def _read_places(path: Path) -> dict[str, TensorPlace]:
    # Imported only here: torch takes seconds to start, and most models are in safetensors files.
    from checkpoint_convert.formats.torch_file import read_places  # noqa: PLC0415

    return read_places(path)


def _chosen(found: dict[str, T], is_wanted: Callable[[str], bool]) -> dict[str, T]:
    return {name: each for name, each in found.items() if is_wanted(name)}


def _renamed(found: dict[str, T], rename: Callable[[str], str]) -> dict[str, T]:
    return {rename(name): each for name, each in found.items()}


def _locate_indexed(
    path: Path,
    read: Callable[[Path], dict[str, TensorPlace]],
    is_wanted: Callable[[str], bool],
    rename: Callable[[str], str],
) -> dict[str, TensorPlace]:
    index = _chosen(_renamed(_weight_map(path), rename), is_wanted)
    files = sorted(set(index.values()))
    outside = [file for file in files if file != Path(file).name or file == ".."]
    if outside:
        raise ValueError(f"{path} names files outside the folder: {outside}")
    absent = [file for file in files if not isfile(path.parent / file)]
    if absent:
        raise ValueError(f"{path} names files that are not there: {absent}")
    places = {file: _renamed(read(path.parent / file), rename) for file in files}
    lost = [f"{name} in {file}" for name, file in index.items() if name not in places[file]]
    if lost:
        raise ValueError(f"{path} names tensors that are not there: {lost}")
    found = {name: places[file][name] for name, file in index.items()}
    if is_wanted is _any:
        _check_read_alike(path, found, places)
    return found


def _check_read_alike(
    path: Path, found: dict[str, TensorPlace], places: dict[str, dict[str, TensorPlace]]
) -> None:
    """Raise ValueError for what readers of whole shards, which engines and transformers are, read
    differently: a tensor that two shards hold, with other values, or an unnamed head."""
    for file, held in places.items():
        for name, place in held.items():
            if name in found and not (place == found[name] or _same_values(place, found[name])):
                raise ValueError(
                    f"{path} says that {name} is in {found[name].file.name}, and {file} holds "
                    "another of that name: take it out of one of them"
                )
            if name == _HEAD and name not in found:
                raise ValueError(
                    f"{file} holds {name}, which {path} does not name: add it there, or take it "
                    "out of the file"
                )


def _weight_map(path: Path) -> dict[str, str]:
    index = read_json(path).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
        raise ValueError(f"{path} has no weight_map from tensor to file names")
    return index


def _check_one_set(folder: Path) -> None:
    """Raise ValueError if vLLM and SGLang read other weight files in `folder` than are read here.

    Here, as by transformers, one file goes before those of an index. Engines read all files, or
    those of an index of safetensors. A set that all pass over, such as Mistral's
    consolidated.safetensors beside an index, is none.
    """
    ours, told = _files_read(folder)
    theirs = _files_of_engines(folder)
    if theirs != ours:
        more = sorted(theirs - ours)
        raise ValueError(
            f"{folder} has two sets of weights: {told} is read here and by transformers, "
            f"{_some(more or sorted(theirs))} by vLLM and SGLang: take one of them out"
        )


def _files_read(folder: Path) -> tuple[set[str], str]:
    """The weight files that are read here, and what to call them; `folder` has some."""
    singles = [name for name in (SINGLE_FILE, BIN_FILE) if (folder / name).is_file()]
    indexes = [name for name in (INDEX_FILE, BIN_INDEX_FILE) if (folder / name).is_file()]
    if SINGLE_FILE in singles or (singles and INDEX_FILE not in indexes):
        return {singles[0]}, singles[0]
    files = {*_weight_map(folder / indexes[0]).values()}
    return files, f"{_some(sorted(files))} of {indexes[0]}"


def _files_of_engines(folder: Path) -> set[str]:
    """Names of the weight files that vLLM and SGLang read."""
    files = {file.name for file in folder.iterdir() if not file.name.startswith(".")}
    if safetensors := {name for name in files if name.endswith(".safetensors")}:
        index = folder / INDEX_FILE
        return {*_weight_map(index).values()} if index.is_file() else safetensors
    return {name for name in files if name.endswith(".bin") and not name.endswith(_NO_WEIGHTS)}


def _some(names: list[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def other_towers(folder: Path) -> tuple[dict[str, str], dict[str, TensorPlace]]:
    """How a multimodal folder names each tensor of its text tower, by `text_name`, and the places
    of all others. Both are empty for a model of text."""
    if not has_other_towers(folder):
        return {}, {}
    names = {text_name(name): name for name in _located(folder, _any, str)}
    others = {name for name in names if not is_of_text(name)}
    return names, locate_tensors(folder, others)


def mtp_tensors(folder: Path, shape: ModelShape) -> dict[str, TensorPlace]:
    """Places of the tensors of layers for multi-token prediction, but for those that are trained;
    none in a folder without weights.

    Raises ValueError, as `locate_tensors`, and for tensors that cannot be read.
    """
    if not shape.num_mtp_layers or not _has_weights(folder):
        return {}
    places = _located(folder, lambda name: _is_of_mtp_layer(name, shape), text_name)
    faults: list[str] = []
    if isinstance(scheme := read_scheme(folder), Scheme):
        places, faults = with_scales(places, scheme)
    if shape.trains_mtp:  # after their scales were found, which would stay otherwise
        trained = file_tensors(shape)
        places = _chosen(places, lambda name: name not in trained)
    faults += [fault for each in places.items() for fault in _faults_of_mtp(*each, scheme)]
    if faults:
        raise ValueError(
            f"layers for multi-token prediction in {folder} cannot be read:\n  "
            + "\n  ".join(faults)
        )
    return places


def _has_weights(folder: Path) -> bool:
    """Whether it has any file of weights: one of a model's small files has an index at most."""
    names = [SINGLE_FILE, BIN_FILE]
    for index in (INDEX_FILE, BIN_INDEX_FILE):
        if (folder / index).is_file():
            names += {*read_json(folder / index).get("weight_map", {}).values()}
    return any(isfile(folder / name) for name in names)


def _faults_of_mtp(
    name: str, place: TensorPlace, scheme: Scheme | Mxfp4Scheme | None
) -> Iterator[str]:
    is_quantized = isinstance(scheme, Scheme) and place.dtype == scheme.dtype
    if not place.shape or not (place.dtype in ITEM_SIZES or is_quantized):
        yield (
            f"{name} {list(place.shape)} has dtype {place.dtype}, supported are tensors with "
            f"dimensions of {sorted(ITEM_SIZES)}"
        )


def check_weights(
    folder: str | Path, shape: ModelShape, names: Collection[str] | None = None
) -> dict[str, TensorPlace]:
    """Places of exactly the tensors that `shape` requires; reads headers, not weights.

    The one exception is a tied model that also stores its head: both tables are read and compared.
    Quantised weights are `QuantizedPlace` or `Mxfp4Place`, and tensors that only they need are left
    out. `names` limits the check and the result to those tensors. Raises ValueError that lists all
    tensors that are missing or unexpected or have the wrong shape or an unsupported dtype, and for
    a folder with an adapter, which would change the weights, or, without `names`, with two sets of
    weights. Other towers than that of text are not checked.
    """
    folder = Path(folder)
    if (folder / ADAPTER_FILE).is_file():
        raise ValueError(
            f"{folder} has a LoRA adapter, which would be left out: merge it into the weights "
            f"(checkpoint-convert merge), or remove {ADAPTER_FILE}"
        )
    wanted = file_tensors(shape)
    if names is not None:
        wanted = _chosen(wanted, names.__contains__)
    scheme, has_others = read_scheme(folder), has_other_towers(folder)
    places, faults = _with_scales(folder, names, scheme)
    if names is None:
        _check_one_set(folder)
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
    """Explain why a tensor may have another shape than is wanted."""
    is_stack = shape.moe is not None and shape.moe.stacks == "transposed"
    if is_stack and found == (*wanted[:-2], *wanted[:-3:-1]):
        return " (transposes of the published ones, as transformers 5 saves them)"
    return ""


def _with_scales(
    folder: Path, names: Collection[str] | None, scheme: Scheme | Mxfp4Scheme | None
) -> tuple[dict[str, TensorPlace], list[str]]:
    """The places of `locate_tensors` with their scales, and what is wrong with these."""
    if scheme is None:
        return locate_tensors(folder, names), []
    if names is not None:
        names = scheme.stored_names(names)
    located = locate_tensors(folder, names)
    if isinstance(scheme, Mxfp4Scheme):
        return with_blocks(located, scheme)
    return with_scales(located, scheme)


def _faults_of_extra(name: str, places: dict[str, TensorPlace], shape: ModelShape) -> Iterator[str]:
    """Faults of a tensor that `shape` does not include.

    A head that equals the embedding it is tied to is fine. If the two differ, transformers unties
    them, so the head is not a mere copy. If only the head is stored, vLLM unties the model and
    silently serves it with an embedding that was never loaded.
    """
    if name == _HEAD and shape.tie_word_embeddings:
        embedding = FAMILIES[shape.family].file_names.get(_EMBEDDING, _EMBEDDING) + ".weight"
        table = places.get(embedding)
        if table is None:
            yield f"{_HEAD} is stored without the embedding it is tied to: save it as {embedding}"
        elif not _same_values(places[name], table):
            yield (
                f"{_HEAD} differs from the embedding that config.json ties it to: set "
                "tie_word_embeddings to false"
            )
    elif not (name.endswith(_RECOMPUTED) or _is_of_mtp_layer(name, shape)):
        yield f"{name} {list(places[name].shape)} is not part of the model"


def _is_of_mtp_layer(name: str, shape: ModelShape) -> bool:
    """Whether a tensor is of the layers that predict further tokens: behind the last one, or, of
    Qwen's hybrids, apart."""
    if name.startswith("mtp."):
        return shape.num_mtp_layers > 0
    layer = _LAYER.match(name)
    further = range(shape.num_layers, shape.num_layers + shape.num_mtp_layers)
    return layer is not None and int(layer[1]) in further


def _same_values(a: TensorPlace, b: TensorPlace) -> bool:
    if a.shape != b.shape:
        return False
    if a == b:  # torch.save stores a tied table once
        return True
    if a.dtype == b.dtype and _same_bytes(a, b):
        return True
    if not {a.dtype, b.dtype} <= ITEM_SIZES.keys():
        return False
    # Imported only here, as above: two dtypes may hold the same values, and zero has two signs.
    from checkpoint_convert.formats.tensor_io import same_values  # noqa: PLC0415

    return same_values(a, b)


def _same_bytes(a: TensorPlace, b: TensorPlace, chunk: int = 1 << 24) -> bool:
    with a.file.open("rb") as file_a, b.file.open("rb") as file_b:
        file_a.seek(a.offset)
        file_b.seek(b.offset)
        return all(
            file_a.read(min(chunk, a.num_bytes - i)) == file_b.read(min(chunk, b.num_bytes - i))
            for i in range(0, a.num_bytes, chunk)
        )
