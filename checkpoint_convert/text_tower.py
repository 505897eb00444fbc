"""The text tower of a multimodal checkpoint: its config, and the names of its tensors.

It is trained and served on text. Models of the kinds Qwen2.5-VL and Qwen3-VL, also with experts,
take images too; their vision towers may be trained: see `ModelShape.vision`. Other towers stay as
they are in the weight files.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpoint_convert.families.multimodal import MULTIMODAL
from checkpoint_convert.families.vision import VISION
from checkpoint_convert.quantized.scheme import CONFIG_KEYS

# Keys whose defaults differ between the config classes of text tower and family.
_EXPLICIT = ("num_key_value_heads", "rms_norm_eps", "max_position_embeddings", "rope_theta")
_TIED = "tie_word_embeddings"
# Prefixes in multimodal weight files and engines, with the prefix here: that of a text model, or
# of a vision tower in engines.
_PREFIXES = {"model.language_model.": "model.", "language_model.": "", "model.visual.": VISION}
_OF_TEXT = re.compile(r"(model\.(embed_tokens|layers|norm)|lm_head)\.")


def is_multimodal(config: Mapping[str, Any]) -> bool:
    """Whether a config.json describes a model with towers besides the text tower."""
    return config.get("model_type") in list(MULTIMODAL)  # as a JSON value may be unhashable


def text_config(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The text tower's config in the form of a text model's; a text model's config as it is.

    `path` names the file in errors. Raises ValueError for a tower of an unknown family, and for a
    key that the two config classes would read differently.
    """
    if not is_multimodal(config):
        return dict(config)
    text = config.get("text_config")
    if text is None and "hidden_size" in config:  # as Qwen2.5-VL was published
        text = {key: value for key, value in config.items() if key != "vision_config"}
        text |= {"model_type": f"{config['model_type']}_text"}
    kind = text.get("model_type") if isinstance(text, dict) else None
    whole = MULTIMODAL[config["model_type"]]
    if not isinstance(text, dict) or kind not in list(whole.text):
        raise ValueError(
            f"{path}: text_config of a {config['model_type']} has model_type {kind!r}, "
            f"supported: {[*whole.text]}"
        )
    inside = config.get("text_config") or {}
    if quantized := [key for key in CONFIG_KEYS if inside.get(key)]:
        raise ValueError(
            f"{path}: weights are quantised by {quantized[0]} inside of text_config, which is not "
            "supported: convert them to bfloat16 first, and take the key out"
        )
    rope = _rope(text)
    given = {*text, *(key for each in rope.values() for key in each)}
    if "num_local_experts" in given:  # transformers 5's name for the key
        given.add("num_experts")
    absent = [key for key in (*_EXPLICIT, *whole.explicit) if key not in given]
    if absent and not whole.has_defaults_of_family:
        others = "".join(f", nor has its {key}" for key in rope if absent[0] == "rope_theta")
        raise ValueError(f"{path}: text_config has no {absent[0]}{others}")
    for key, value in whole.required.items():
        # Not `!=`: JSON's 1 equals True.
        if text[key] is not value:
            raise ValueError(
                f"{path}: {key} is {text[key]!r}, only {value!r} is supported: transformers has no "
                "other for this model"
            )
    tied = [each[_TIED] for each in (config, text) if _TIED in each]
    # transformers ties these models by the outer key alone: `text_config`'s true has no effect.
    is_untied = tied == [True] and _TIED not in config and not whole.is_tied_by_text
    if tied[:1] != tied[-1:] or not (whole.has_defaults_of_family or (tied and not is_untied)):
        raise ValueError(
            f"{path}: {_TIED} must be given, with one value inside and outside of text_config; it "
            f"is {tied}"
        )
    ends = {key: config[key] for key in ("eos_token_id",) if config.get(key) is not None}
    of_text = {**ends, **text, "model_type": whole.text[kind], **rope}
    return of_text | {_TIED: tied[0]} if tied else of_text


def _rope(text: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE's keys for text, whose three positions are equal: type `mrope` becomes `default`."""
    # transformers ignores `rope_parameters`, with its `rope_theta`, next to a `rope_scaling`.
    key = "rope_scaling" if text.get("rope_scaling") else "rope_parameters"
    rope = text.get(key)
    if not isinstance(rope, dict):
        return {}
    types = {each: rope[each] for each in ("rope_type", "type") if each in rope}
    plain = {each: "default" for each, kind in types.items() if kind == "mrope"}
    return {key: {**rope, **plain}}


def text_name(name: str) -> str:
    """Name of a text-tower tensor as in a text model, or of a vision-tower tensor as in engines;
    other names stay."""
    for prefix, own in _PREFIXES.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return name


def name_in_whole(name: str) -> str:
    """Map the name of a text decoder's module to transformers' multimodal model."""
    return name.replace("model.", "model.language_model.", 1)


def is_of_text(name: str) -> bool:
    """Whether a tensor, by its `text_name`, belongs to the text tower."""
    return _OF_TEXT.match(name) is not None
