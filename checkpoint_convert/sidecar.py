"""The files of a model besides its weights: config, generation config, tokenizer, templates."""

import json
import re
import shutil
from collections import Counter
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from checkpoint_convert.families import FAMILIES
from checkpoint_convert.folder import check_folder, read_json
from checkpoint_convert.formats import is_torch_dist
from checkpoint_convert.formats.safetensors_file import TORCH_NAMES
from checkpoint_convert.hf_config import read_shape
from checkpoint_convert.hf_folder import ADAPTER_FILE
from checkpoint_convert.quantized.scheme import CONFIG_KEYS, MODELOPT_FILE
from checkpoint_convert.shape import ModelShape, differing_fields
from checkpoint_convert.text_tower import text_config
from parallel import Shape

# Folder inside a Megatron checkpoint that holds the sidecar files.
CHECKPOINT_FOLDER = "hf_config"
# Configs, tokenizers (including Mistral's tokenizer.model.v3), templates, and the files that
# licences require to be passed on.
_SIDECAR = re.compile(
    r".*\.(json|jinja|model|txt|tiktoken|v\d+)|(LICENSE|NOTICE)(\..*)?", re.IGNORECASE
)
NOTHING: Mapping[str, Any] = {}
_TEMPLATES = "additional_chat_templates"
JSON_FILE, SENTENCEPIECE_FILE = "tokenizer.json", "tokenizer.model"
# vocab.json is half of byte-level BPE in two files, the format in which Qwen2 was published.
TOKENIZER_FILES = (JSON_FILE, SENTENCEPIECE_FILE, "vocab.json")
# Files that Megatron-LM and our training runs write next to the checkpoint folders.
_POINTERS = ("latest_checkpointed_iteration.txt", "LATEST")


def model_config(path: Path, hf_config: Path | None = None) -> Path:
    """The folder with the sidecar files of the weights at `path`.

    `hf_config` if given; else the folder inside a Megatron checkpoint, or the Hugging Face folder
    itself.
    """
    if hf_config is not None:
        _check_same_model(path, hf_config)
        return hf_config
    _check_is_one(path)
    if not is_torch_dist(path):
        return path
    if not (path / CHECKPOINT_FOLDER).is_dir():
        raise ValueError(
            f"{path} does not say which model it is: give --hf-config, a folder with the "
            "model's config.json"
        )
    return path / CHECKPOINT_FOLDER


def own_shape(path: Path) -> ModelShape | None:
    """The model shape by the config stored with the weights at `path`; None without one."""
    _check_is_one(path)
    config = path / CHECKPOINT_FOLDER
    if not is_torch_dist(path):
        check_folder(path)
        config = path
    return read_shape(config) if (config / "config.json").is_file() else None


def _check_is_one(path: Path) -> None:
    for folder in (path, path / "checkpoints"):
        if any((folder / name).is_file() for name in _POINTERS):
            inner = sorted(each for each in folder.iterdir() if each.is_dir())
            found = [each.name for each in inner if is_torch_dist(each)]
            raise ValueError(f"{folder} is a folder of checkpoints; give the path of one: {found}")


def _check_same_model(path: Path, given: Path) -> None:
    """Another model's config can match all tensor shapes and still scramble the weights."""
    own = own_shape(path)
    differing = differing_fields(own, read_shape(given)) if own is not None else []
    if differing:
        raise ValueError(
            f"{given} describes another model than {path}; leave --hf-config out, or correct it:"
            "\n  " + "\n  ".join(differing)
        )


def main_dtype(shapes: Mapping[str, Shape], dtypes: Mapping[str, str]) -> str:
    """The dtype with the most elements, for config.json."""
    totals: Counter[str] = Counter()
    for name, shape in shapes.items():
        totals[dtypes[name]] += prod(shape)
    return totals.most_common(1)[0][0]


def sidecar_files(folder: Path) -> list[Path]:
    """The files in `folder` that belong to its model besides the weights.

    Raises ValueError for a link to a file outside of any model, which may be private.
    """
    files = [
        file
        for file in (*folder.iterdir(), *(folder / _TEMPLATES).glob("*.jinja"))
        if _SIDECAR.fullmatch(file.name)
        # These describe weight files that are not copied.
        and not file.name.endswith((".index.json", ADAPTER_FILE, MODELOPT_FILE))
        and file.is_file()
    ]
    for file in files:
        _check_link(folder, file)
    return files


def tokenizer_file(folder: Path) -> Path:
    """The first of TOKENIZER_FILES that is in `folder`; ValueError if none is."""
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            return folder / name
    raise ValueError(f"{folder} has no tokenizer: none of {', '.join(TOKENIZER_FILES)} is there")


def copy_sidecar_files(
    source: Path,
    folder: Path,
    dtype: str,
    further: Mapping[str, Any] = NOTHING,
    num_mtp_layers: int = 0,
) -> None:
    """Copy the sidecar files from one folder to another, and adjust config.json.

    It names `dtype` and `num_mtp_layers` multi-token-prediction layers, and has the `further` keys.
    Raises ValueError like `sidecar_files`.
    """
    for file in sidecar_files(source):
        copy = folder / file.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)
    config = read_json(source / "config.json")
    _set_dtype(config, dtype)
    if isinstance(config.get("text_config"), dict):
        _set_dtype(config["text_config"], dtype)
    # No code is copied, and weights were dequantised when they were read.
    for key in ("auto_map", *CONFIG_KEYS):
        config.pop(key, None)
    family = FAMILIES[text_config(source / "config.json", config)["model_type"]]
    if family.mtp.num_layers is not None:
        config.get("text_config", config)[family.mtp.num_layers] = num_mtp_layers
    (folder / "config.json").write_text(
        json.dumps({**config, **further}, indent=2) + "\n", encoding="utf-8"
    )


def _set_dtype(config: dict[str, Any], dtype: str) -> None:
    # transformers 5 renamed torch_dtype to dtype, and reads both.
    keys = [key for key in ("torch_dtype", "dtype") if key in config] or ["dtype"]
    config |= dict.fromkeys(keys, TORCH_NAMES[dtype])


def _check_link(folder: Path, file: Path) -> None:
    """Raise ValueError for a link out of `folder`. Allowed are a file of the same name in another
    model's folder, and a file of the Hub's cache (`blobs`, next to `snapshots`)."""
    target = file.resolve()
    is_cached = target.parent.name == "blobs" and target.parent.with_name("snapshots").is_dir()
    models = [parent for parent in target.parents[:2] if (parent / "config.json").is_file()]
    is_of_a_model = target.name == file.name and bool(models)
    if not (target.is_relative_to(folder.resolve()) or is_cached or is_of_a_model):
        raise ValueError(
            f"{file} is a link to {target}, outside of {folder}: replace it with a copy of the file"
        )
