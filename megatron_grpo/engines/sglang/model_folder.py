"""A folder for SGLang of a model with other towers than text, or with quantised weights.

From the original, SGLang would build all towers, and quantised layers. It gets a config.json of the
text model alone, and its workers read the text weights, dequantised, from the original folder. If
prompts have images, it gets the whole model.
"""

import json
import os
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from checkpoint_convert.families import FAMILIES
from checkpoint_convert.folder import read_json
from checkpoint_convert.hf_config import has_other_towers
from checkpoint_convert.quantized.scheme import CONFIG_KEYS, MODELOPT_FILE
from checkpoint_convert.text_tower import text_config
from megatron_grpo.engines.arguments import command_flags
from megatron_grpo.engines.sglang.args import LIMIT, NEEDED, is_plain

WEIGHTS_VARIABLE = "MEGATRON_GRPO_WEIGHTS"
"""Tells the workers the folder with the weights, if SGLang has another folder."""
LEFT_OUT = ("config.json", MODELOPT_FILE)
WEIGHTS = (".safetensors", ".bin", ".index.json")
"""Name endings of files with weights."""


def server_arguments(given: Sequence[str], own: Path) -> list[str]:
    """Arguments of SGLang's server: `given` and NEEDED. `own` is a path for a `plain_folder`."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model-path", "--model", type=Path, required=True)
    parser.add_argument("--" + LIMIT.replace("_", "-"), type=json.loads)
    found, others = parser.parse_known_args(given)
    images = getattr(found, LIMIT)
    folder = found.model_path if images else plain_folder(found.model_path, own)
    return [f"--model-path={folder}", *others, *command_flags({LIMIT: images, **NEEDED})]


def plain_folder(model: Path, own: Path) -> Path:
    """Return `model` if it is plain; else make `own`, with its text config and links to its
    tokenizer, and set WEIGHTS_VARIABLE."""
    if is_plain(model):
        return model
    config = read_json(file := model / "config.json")
    text = text_config(file, config)
    plain = {key: value for key, value in text.items() if key not in CONFIG_KEYS}
    if has_other_towers(model):
        family = FAMILIES[text["model_type"]]
        loaded_as = family.engines.sglang.loaded_as or family.model_type
        plain["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[loaded_as]]
        plain.setdefault("dtype", config.get("dtype") or config.get("torch_dtype"))
        for key in {"rope_scaling", "rope_parameters"} & plain.keys():  # without image positions
            rope = plain[key] or {}
            plain[key] = {name: rope[name] for name in rope if not name.startswith("mrope_")}
    own.mkdir()
    (own / "config.json").write_text(json.dumps(plain, indent=2), encoding="utf-8")
    for each in model.iterdir():
        if each.name not in LEFT_OUT and not each.name.endswith(WEIGHTS):
            (own / each.name).symlink_to(each.absolute())
    os.environ[WEIGHTS_VARIABLE] = str(model)
    return own
