"""The weight files of a folder: which tensor is in which file, by their headers."""

from collections.abc import Callable
from os.path import isfile  # false also for names that no file can have
from pathlib import Path

from checkpoint_convert.folder import check_folder, read_json
from checkpoint_convert.formats.safetensors_file import (
    INDEX_FILE,
    ITEM_SIZES,
    SINGLE_FILE,
    TensorPlace,
    read_header,
)

BIN_FILE = "pytorch_model.bin"
BIN_INDEX_FILE = "pytorch_model.bin.index.json"
HEAD = "lm_head.weight"
_NO_WEIGHTS = ("training_args.bin", "optimizer.bin")
"""Endings of the names of `.bin` files that vLLM and SGLang do not read."""


def located(
    folder: Path,
    rename: Callable[[str], str],
    is_wanted: Callable[[str], bool] | None = None,
) -> dict[str, TensorPlace]:
    """Place of every tensor in `folder` that `is_wanted`, by the names that `rename` gives.

    Raises ValueError for files that are missing or malformed.
    """
    check_folder(folder)
    for single, index, read in (
        (SINGLE_FILE, INDEX_FILE, read_header),
        (BIN_FILE, BIN_INDEX_FILE, _read_places),
    ):
        if (folder / single).is_file():
            return _chosen(_renamed(read(folder / single), rename), is_wanted)
        if (folder / index).is_file():
            return _locate_indexed(folder / index, read, rename, is_wanted)
    raise ValueError(
        f"{folder} has no weights: none of {SINGLE_FILE}, {INDEX_FILE}, {BIN_FILE} and "
        f"{BIN_INDEX_FILE} is there"
    )


def _read_places(path: Path) -> dict[str, TensorPlace]:
    # Imported only here: torch takes seconds to start, and most models are in safetensors files.
    from checkpoint_convert.formats.torch_file import read_places  # noqa: PLC0415

    return read_places(path)


def _chosen[T](found: dict[str, T], is_wanted: Callable[[str], bool] | None) -> dict[str, T]:
    return {name: each for name, each in found.items() if is_wanted is None or is_wanted(name)}


def _renamed[T](found: dict[str, T], rename: Callable[[str], str]) -> dict[str, T]:
    return {rename(name): each for name, each in found.items()}


def _locate_indexed(
    path: Path,
    read: Callable[[Path], dict[str, TensorPlace]],
    rename: Callable[[str], str],
    is_wanted: Callable[[str], bool] | None,
) -> dict[str, TensorPlace]:
    index = _chosen(_renamed(_weight_map(path), rename), is_wanted)
    files = sorted(set(index.values()))
    # The name of `Path("..")` is "..", too.
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
    if is_wanted is None:  # otherwise some files were not opened
        _check_read_alike(path, found, places)
    return found


def _check_read_alike(
    path: Path, found: dict[str, TensorPlace], places: dict[str, dict[str, TensorPlace]]
) -> None:
    """Raise ValueError if engines and transformers, which read whole shards, would see other
    weights: a tensor with other values in a second shard, or a head that the index does not name.
    """
    for file, held in places.items():
        for name, place in held.items():
            if name in found and not (place == found[name] or same_values(place, found[name])):
                raise ValueError(
                    f"{path} says that {name} is in {found[name].file.name}, but {file} holds "
                    "other values of that name: take one of them out"
                )
            if name == HEAD and name not in found:
                raise ValueError(
                    f"{file} holds {name}, which {path} does not name: add it there, or take it "
                    "out of the file"
                )


def _weight_map(path: Path) -> dict[str, str]:
    index = read_json(path).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
        raise ValueError(f"{path} has no weight_map from tensor to file names")
    return index


def check_one_set(folder: Path) -> None:
    """Raise ValueError if vLLM and SGLang read other weight files in `folder` than are read here.

    Here, as in transformers, a single file goes before an index. Engines read the files of an index
    of safetensors, or else all files. Files that nobody reads, such as Mistral's
    consolidated.safetensors next to an index, do not matter.
    """
    ours, read = _files_read(folder)
    theirs = _files_of_engines(folder)
    if theirs != ours:
        more = sorted(theirs - ours)
        raise ValueError(
            f"{folder} has two sets of weights: {read} is read here and by transformers, "
            f"{_some(more or sorted(theirs))} by vLLM and SGLang: take one of them out"
        )


def _files_read(folder: Path) -> tuple[set[str], str]:
    """The weight files that are read here, and a phrase that names them; `folder` has some."""
    singles = [name for name in (SINGLE_FILE, BIN_FILE) if (folder / name).is_file()]
    indexes = [name for name in (INDEX_FILE, BIN_INDEX_FILE) if (folder / name).is_file()]
    # In the order of `located`: each file of safetensors goes before pytorch_model.bin.
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


def has_weights(folder: Path) -> bool:
    """Whether `folder` has any weight file; without one it may still have an index."""
    names = [SINGLE_FILE, BIN_FILE]
    for index in (INDEX_FILE, BIN_INDEX_FILE):
        if (folder / index).is_file():
            names += {*read_json(folder / index).get("weight_map", {}).values()}
    return any(isfile(folder / name) for name in names)


def same_values(a: TensorPlace, b: TensorPlace) -> bool:
    """Whether two stored tensors have equal shapes and values, in any two dtypes."""
    if a.shape != b.shape:
        return False
    if a == b:  # torch.save stores a tied table once
        return True
    if a.dtype == b.dtype and _same_bytes(a, b):
        return True
    if not {a.dtype, b.dtype} <= ITEM_SIZES.keys():
        return False
    # Imported only here, as above: two dtypes may hold the same values, and zero has two signs.
    from checkpoint_convert.formats import tensor_io  # noqa: PLC0415

    return tensor_io.same_values(a, b)


def _same_bytes(a: TensorPlace, b: TensorPlace, chunk: int = 1 << 24) -> bool:
    with a.file.open("rb") as file_a, b.file.open("rb") as file_b:
        file_a.seek(a.offset)
        file_b.seek(b.offset)
        return all(
            file_a.read(min(chunk, a.num_bytes - i)) == file_b.read(min(chunk, b.num_bytes - i))
            for i in range(0, a.num_bytes, chunk)
        )
