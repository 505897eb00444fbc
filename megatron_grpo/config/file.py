"""Read and write configs as YAML: a file plus `key.sub=value` overrides, checked strictly."""

import hashlib
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, to_jsonable_python

from megatron_grpo.config.checks import check_config, mistakes_in
from megatron_grpo.config.config import Config, RewardFunction
from megatron_grpo.config.data import KINDS_OF_PATH, WeightedPath
from megatron_grpo.config.eval import EvalSet, section_of, without_defaults
from megatron_grpo.config.hints import (
    key_hint,
    meant_key,
    near_files,
    nearest_keys,
    value_hint,
    word_hint,
)
from megatron_grpo.config.overrides import apply_override
from megatron_grpo.config.section import (
    Mistake,
    as_yaml,
    fields_of,
    meaning_of,
    within,
    without_inherited,
)
from megatron_grpo.config.sources import OWN_SECTIONS, Source
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
        near = [*map(str, near_files(path))]
        advice = f"did you mean {' or '.join(near)}?" if near else "see configs/ for examples"
        raise ValueError(f"config file {path} does not exist: {advice}")
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
    # Without defaults, and without values that other sections have given: they follow again.
    table = config.model_dump(mode="json", exclude_unset=True)
    if "eval" in table:
        keys = [override.partition("=")[0] for override in overrides]
        shared = [key.removeprefix("eval.") for key in keys if key.startswith("eval.")]
        table["eval"] = without_defaults(table["eval"], table, shared)
    sources = table.get("sources", {}).get("by_name", {})
    for name, source in sources.items():
        sources[name] = without_inherited(source, OWN_SECTIONS, table)
    return parse_config(table, overrides)


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
    """Validate a nested table of config values with overrides; raises the errors of `load_config`.

    Remedies are tried out in the table, so that the error also has what is wrong only after them.
    Of several the one is taken that changes no override, else the override that was given first.
    """
    told, added = dict[str, None](), dict[str, str]()
    for override in overrides:
        try:
            apply_override(table, override, Config)
        except ValueError as error:
            hint = "" if "=" in override else word_hint(override, known_keys())
            told[f"{error}{hint and ': '}{hint}"] = None
    given = [override.partition("=")[0] for override in overrides]
    told |= dict.fromkeys(_without_unknown(table))
    are_words = bool(told)  # what only an edit mends
    while True:
        cfg, found = _validated(table)
        told |= dict.fromkeys(map(str, found))
        chosen = [each for mistake in found for each in _remedy(mistake, given, added)]
        for override in chosen:
            apply_override(table, override, Config)
        if not chosen:
            break
    if cfg and not told:
        return cfg
    paste = "to make it legal, add" if cfg and not are_words else "after that, add"
    line = [f"{paste}: {shlex.join(added.values())}"] if added else []
    raise ValueError("\n".join([*told, *line]))


def _remedy(mistake: Mistake, given: Sequence[str], added: dict[str, str]) -> Sequence[str]:
    """Choose a remedy that changes no key in `added`, and add its overrides there."""
    options = [
        {each.partition("=")[0]: each for each in remedy.split(" and ")}
        for remedy in mistake.remedies
    ]
    ranks = {key: rank for rank, key in enumerate(given)}
    chosen = min(
        (each for each in options if each.keys().isdisjoint(added)),
        key=lambda each: max(ranks.get(key, -1) for key in each),
        default={},
    )
    added |= chosen
    return [*chosen.values()]


def _without_unknown(table: dict[str, Any]) -> Iterator[str]:
    """Take unknown keys out of the table, or correct their spelling; yield what they should be."""
    sections: dict[str, type[BaseModel]] = {"": Config}
    sections |= {f"eval.sets.{name}.": EvalSet for name in _names(table, "eval", "sets")}
    sections |= {f"sources.by_name.{name}.": Source for name in _names(table, "sources", "by_name")}
    known = [key for start, section in sections.items() for key, _ in fields_of(section, start)]
    for key, value in [*_take_unknown(table, known)]:
        yield f"unknown config key {key!r}: {key_hint(key, known)}"
        # A value that cannot be moved is left out, as that of a key without a near one.
        with suppress(ValueError):
            if meant := meant_key(key, known):
                apply_override(table, f"{meant}={as_yaml(value)}", Config)


def _take_unknown(
    table: dict[Any, Any], known: Sequence[str], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Remove the values of unknown keys from nested tables, and yield them by dotted names."""
    for name, value in [*table.items()]:
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            yield from _take_unknown(value, known, f"{key}.")
            if not table[name]:
                del table[name]
        elif not _is_known(key, known):
            yield key, table.pop(name)


def _validated(table: dict[str, Any]) -> tuple[Config | None, Sequence[Mistake]]:
    """The config of a table of known keys, or its mistakes."""
    for key, value in _leaves(table):
        if not is_unicode(json.dumps({key: value}, ensure_ascii=False, default=str, skipkeys=True)):
            message = "half of a surrogate pair is no text; correct it, or leave it out"
            return None, [Mistake(f"config key {key!r} = {value!r}: {message}")]
    try:
        cfg = Config.model_validate(table)
    except ValidationError as error:
        return None, [*_mistakes(error)]
    found = [*mistakes_in(cfg)]
    return (None if found else cfg), found


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


def _parse_yaml(text: str, source: str) -> Any:
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        advice = "\n(YAML is indented with spaces, not tabs)" if r"'\t'" in str(error) else ""
        raise ValueError(f"{source} is not valid YAML: {error}{advice}") from None


def known_keys() -> list[str]:
    """Every settable key, without those of named sets and sources."""
    return [key for key, _ in fields_of(Config)]


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


def _mistakes(error: ValidationError) -> Iterator[Mistake]:
    """Describe each mistake on one line: the key, the given value and the expected one."""
    fields = dict(fields_of(Config))
    for detail in error.errors():
        # A default that depends on an invalid field: that field's own error is reported already.
        if detail["type"] != "default_factory_not_called":
            yield _describe(detail, fields)


def _describe(detail: ErrorDetails, fields: Mapping[str, FieldInfo]) -> Mistake:
    key = ".".join(str(part) for part in detail["loc"] if part not in KINDS_OF_PATH)
    meaning = meaning_of(fields[key]) if key in fields else ""
    if detail["type"] == "missing":
        return Mistake(f"config key {key} is missing. {meaning}".rstrip())
    if detail["type"] == "extra_forbidden":  # in a list, which `_leaves` does not descend into
        names = list((WeightedPath if "path" in detail["loc"] else RewardFunction).model_fields)
        nearest = nearest_keys(str(detail["loc"][-1]), names)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"use {', '.join(names)}"
        return Mistake(f"unknown config key {key!r}: {hint}")
    if detail["type"] == "value_error":
        error = _in_section(detail["ctx"]["error"], _own_section(detail["loc"]))
        hint, remedies = value_hint(key, str(detail["input"]), ())
        return Mistake(f"{error}; {hint}", *remedies) if hint else error
    message = EXPECTED.get(detail["type"], detail["msg"][0].lower() + detail["msg"][1:])
    given = as_yaml(to_jsonable_python(detail["input"], fallback=str))
    shown = given if detail["input"] is None else repr(detail["input"])
    message = f"config key {key} = {shown}: {message}"
    if first := next((each for each in fields if each.startswith(f"{key}.")), None):
        return Mistake(f"{message}, such as {first}={given}")
    choices = re.findall(r"'([^']*)'", detail.get("ctx", {}).get("expected", ""))
    hint, remedies = value_hint(key, given, choices)
    if detail["input"] is None and key in fields and not fields[key].is_required():
        hint = "leave it out"
        if fields[key].default_factory is None:
            remedies = [f"{key}={as_yaml(to_jsonable_python(fields[key].default))}"]
            hint = f"set {remedies[0]}, its default"
    return Mistake(f"{message}; {hint}" if hint else f"{message}. {meaning}".rstrip(), *remedies)


def _in_section(error: ValueError, section: str) -> Mistake:
    """Name the section whose keys the message and the remedies name as the run has them."""
    remedies = error.remedies if isinstance(error, Mistake) else ()
    if not section:
        return Mistake(str(error), *remedies)
    return Mistake(f"{section}: {error}", *(within(section, each) for each in remedies))


def _own_section(location: Sequence[str | int]) -> str:
    """Section of a held-out set or source, where a mistake lies; else empty."""
    match location:
        case ("eval", "sets", name, *_):
            return section_of(str(name))
        case ("sources", "by_name", name, *_):
            return f"sources.by_name.{name}"
    return "eval" if location[:1] == ("eval",) else ""
