"""Read and write configs as YAML: a file plus `key.sub=value` overrides, checked strictly."""

import difflib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from megatron_grpo.config.checks import check_config
from megatron_grpo.config.config import Config, RewardFunction
from megatron_grpo.config.data import KINDS_OF_PATH, WeightedPath
from megatron_grpo.config.eval import EvalSet, section_of
from megatron_grpo.config.overrides import apply_override
from megatron_grpo.config.sources import Source
from megatron_grpo.config.yaml_text import Loader, dump
from megatron_grpo.unicode import is_unicode

# Tables for other libraries, chat templates and user code, which check the names themselves. Keys
# are compared by their ends, as sets and sources have some of these tables, too.
PASS_THROUGH_KEYS = (
    "model.megatron",
    "data.chat_template_kwargs",
    "rollout.vllm",
    "rollout.sglang",
    "environment.arguments",
    "grpo.loss_arguments",
    "grpo.file_sha256",
)

# Replaces pydantic's messages that would name Python types.
EXPECTED = {
    "model_type": "expected a table of keys",
    "dict_type": "expected a table of keys",
    "tuple_type": "expected a list",
    "path_type": "expected a path",
}


NEAR = 0.75
"""Similarity from which a key counts as a misspelling: num_epochs and num_steps have 0.74."""


OTHER_NAMES = Path(__file__).with_name("other_names.yaml")
"""Last one or two parts of keys of verl, TRL and Megatron-LM, and their equivalents here."""


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML config and apply overrides such as `optimizer.lr=1e-6`: see `overrides`.

    Relative paths are relative to the current directory. Raises ValueError, one line per mistake,
    for unknown keys (with a suggestion), wrong types and conflicting sizes.
    """
    if path.is_dir():
        raise ValueError(
            f"config {path} is a folder: give a YAML file, such as a run's config.yaml"
        )
    if not path.is_file():
        raise ValueError(f"config file {path} does not exist")
    try:
        table = _parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not in UTF-8: {error}") from None
    if not isinstance(table, dict):
        held = "is empty" if table is None else f"holds {type(table).__name__}, no sections"
        needed = [name for name, field in Config.model_fields.items() if field.is_required()]
        raise ValueError(f"{path} {held}: a config needs the sections {', '.join(needed)}")
    return parse_config(table, overrides)


def with_overrides(config: Config, overrides: Sequence[str]) -> Config:
    """Apply overrides to a config; raises the errors of `load_config`."""
    # Without defaults, some of which follow other keys.
    return parse_config(config.model_dump(mode="json", exclude_unset=True), overrides)


def as_overrides(values: Mapping[str, Any]) -> list[str]:
    """Overrides of values by dotted keys, or in nested tables.

    `{"grpo.beta": 0.04, "train": {"seed": 1}}` -> `["grpo.beta=0.04", "train.seed=1"]`
    """
    # JSON is YAML, and its quotes keep a text from being read as a number.
    return [
        f"{key}={json.dumps(value, ensure_ascii=False, default=str)}"
        for key, value in _leaves(values)
    ]


def parse_config(table: dict[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Validate a nested table of config values; raises the errors of `load_config`."""
    for override in overrides:
        apply_override(table, override, Config)
    sections: dict[str, type[BaseModel]] = {"": Config}
    sections |= {f"eval.sets.{name}.": EvalSet for name in _names(table, "eval", "sets")}
    sections |= {f"sources.by_name.{name}.": Source for name in _names(table, "sources", "by_name")}
    known = [key for start, section in sections.items() for key, _ in _known_keys(section, start)]
    leaves = dict(_leaves(table))
    unknown = [key for key in leaves if not _is_known(key, known)]
    if unknown:
        raise ValueError(
            "\n".join(f"unknown config key {key!r}: {_instead_of(key, known)}" for key in unknown)
        )
    for key, value in leaves.items():
        if not is_unicode(json.dumps({key: value}, ensure_ascii=False, default=str, skipkeys=True)):
            raise ValueError(
                f"config key {key!r} = {value!r}: half of a surrogate pair is no text; correct it, "
                "or leave it out"
            )
    try:
        cfg = Config.model_validate(table)
    except ValidationError as error:
        raise ValueError("\n".join(_mistakes(error))) from None
    check_config(cfg)
    return cfg


def with_file_hashes(cfg: Config) -> Config:
    """Write the hashes of the user's loss and advantages into `grpo.file_sha256`; ValueError for a
    missing file, or one with another hash than the config gives."""
    found = {}
    for key, name in cfg.grpo.own_functions.items():
        file = Path(name.rpartition(":")[0])
        if not file.is_file():
            raise ValueError(f"grpo.{key}: {file} does not exist in {Path.cwd()}")
        found[str(file)] = hashlib.sha256(file.read_bytes()).hexdigest()
    for path, known in cfg.grpo.file_sha256.items():
        if known != found.get(path, known):
            raise ValueError(
                f"{path} has changed: its hash is {found[path]}, and grpo.file_sha256 has {known}: "
                "restore the file, or set grpo.file_sha256={} to begin with this one"
            )
    return cfg.model_copy(update={"grpo": cfg.grpo.model_copy(update={"file_sha256": found})})


def with_num_steps(config: Config, num_steps: int) -> Config:
    """Replace `train.num_epochs` by `train.num_steps`; a config without epochs stays as it is.

    Raises ValueError if the learning-rate schedule does not fit into `num_steps`.
    """
    if config.train.num_epochs is None:
        return config
    train = config.train.model_copy(update={"num_steps": num_steps, "num_epochs": None})
    config = config.model_copy(update={"train": train})
    check_config(config)
    return config


def dump_config(config: Config) -> str:
    """Format the resolved config as YAML; `load_config` reads an equal config back."""
    return dump(config.model_dump(mode="json"))


def _instead_of(key: str, known: Sequence[str]) -> str:
    """Suggest the known key nearest to `key`, or list the sections."""
    section = key.partition(".")[0]
    if key == "lora.modules_to_save":  # PEFT has it
        return "layers have adapters or stay as they are: leave it out"
    *_, parent, name = ["", *key.split(".")]
    others = yaml.safe_load(OTHER_NAMES.read_text(encoding="utf-8"))
    for other in (f"{parent}.{name}", name):
        if other in others:
            return f"here it is {others[other]}"
    if keys := _nearest_keys(key, known):
        return f"did you mean {' or '.join(map(repr, keys))}?"
    elsewhere = "docs/coming-from.md has names of other trainers"
    if "." in key and section in Config.model_fields:
        return f"section {section} has no such key; docs/config.md lists all, {elsewhere}"
    return f"the sections are {', '.join(Config.model_fields)}; {elsewhere}"


def _nearest_keys(key: str, known: Sequence[str]) -> Sequence[str]:
    """Find the known key that is spelt alike in each part, or all keys with the same last part."""
    section, _, name = key.rpartition(".")
    likeness = {each: _likeness((section, name), each) for each in known}
    nearest = max(known, key=lambda each: likeness[each])
    if likeness[nearest] >= NEAR:
        return [nearest]
    return [each for each in known if each.rpartition(".")[2] == name]


def _likeness(parts: tuple[str, str], candidate: str) -> float:
    """Similarity from 0 to 1 of the less similar part: the section or the name."""
    section, _, name = candidate.rpartition(".")
    pairs = zip(parts, (section, name), strict=True)
    return min(difflib.SequenceMatcher(None, a, b).ratio() for a, b in pairs)


def _parse_yaml(text: str, source: str) -> Any:
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        advice = "\n(YAML is indented with spaces, not tabs)" if r"'\t'" in str(error) else ""
        raise ValueError(f"{source} is not valid YAML: {error}{advice}") from None


def _known_keys(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield every settable key below `section`, with its description."""
    for name, field in section.model_fields.items():
        kind: Any = field.annotation
        if isinstance(kind, UnionType):  # Section | None
            kind = kind.__args__[0]
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _known_keys(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", " ".join((field.description or "").split())


def _leaves(table: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested tables by dotted names; an empty table is a value."""
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _names(table: Mapping[str, Any], section: str, key: str) -> list[Any]:
    """Names in a table of tables, such as `eval.sets`."""
    found = table.get(section)
    named = found.get(key) if isinstance(found, Mapping) else None
    return [*named] if isinstance(named, Mapping) else []


def _is_known(key: str, known: Sequence[str]) -> bool:
    """Whether `key` is a known key, a whole section, or lies in a pass-through table."""
    is_section = any(name.startswith(f"{key}.") for name in known)
    passed_through = tuple(f"{name}." for name in known if name.endswith(PASS_THROUGH_KEYS))
    return key in known or is_section or key.startswith(passed_through)


def _mistakes(error: ValidationError) -> Iterator[str]:
    """Describe each mistake on one line: the key, the given value and the expected one."""
    descriptions = dict(_known_keys(Config))
    for detail in error.errors():
        # A default that depends on an invalid field: that field's own error is reported already.
        if detail["type"] != "default_factory_not_called":
            yield _describe(detail, descriptions)


def _describe(detail: ErrorDetails, descriptions: Mapping[str, str]) -> str:
    key = ".".join(str(part) for part in detail["loc"] if part not in KINDS_OF_PATH)
    if detail["type"] == "missing":
        return f"config key {key} is missing. {descriptions.get(key, '')}".rstrip()
    if detail["type"] == "extra_forbidden":  # in a list, which `_leaves` does not descend into
        section = WeightedPath if "path" in detail["loc"] else RewardFunction
        fields = list(section.model_fields)
        nearest = _nearest_keys(str(detail["loc"][-1]), fields)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"use {', '.join(fields)}"
        return f"unknown config key {key!r}: {hint}"
    if detail["type"] == "value_error":
        return f"{_held_out(detail['loc'])}{detail['ctx']['error']}"
    message = EXPECTED.get(detail["type"], detail["msg"][0].lower() + detail["msg"][1:])
    return f"config key {key} = {detail['input']!r}: {message}"


def _held_out(location: Sequence[str | int]) -> str:
    """Name the held-out set of a mistake: the message itself names keys as the run has them."""
    if location[:2] == ("eval", "sets") and len(location) > 2:
        return f"{section_of(str(location[2]))}: "
    return "eval: " if location[:1] == ("eval",) else ""
