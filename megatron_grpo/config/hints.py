"""Hints for unknown keys and values: near keys, and names of other trainers."""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import yaml

from megatron_grpo.config.config import Config

NEAR = 0.75
"""Similarity from which a key counts as a misspelling: num_epochs and num_steps have 0.74."""

OTHER_NAMES = Path(__file__).with_name("other_names.yaml")

REMEDY = re.compile(r"(?:(.*): )?([\w.]+=\S+(?: and [\w.]+=\S+)*)")
"""A value's meaning here: overrides, after a remark."""


@cache
def other_names() -> Mapping[str, Mapping[str, str]]:
    """Meaning here of each name of another trainer, by the trainer."""
    return {trainer: _each(table) for trainer, table in _tables()["names"].items()}


@cache
def other_values() -> Mapping[str, Mapping[str, str]]:
    """Meaning here of each value of another trainer, by the key here."""
    return {key: _each(table) for key, table in _tables()["values"].items()}


@cache
def _tables() -> Mapping[str, Mapping[str, Mapping[str, str]]]:
    tables: dict[str, dict[str, dict[str, str]]]
    tables = yaml.safe_load(OTHER_NAMES.read_text(encoding="utf-8"))
    return tables


def _each(table: Mapping[str, str]) -> dict[str, str]:
    """Give each name that shares its meaning with others an entry of its own."""
    return {name: meaning for names, meaning in table.items() for name in names.split(", ")}


def meanings_of(key: str) -> Mapping[str, str]:
    """Meaning here of a key of other trainers, by the trainer."""
    *_, parent, name = ["", *key.split(".")]
    found: dict[str, str] = {}
    for trainer, names in other_names().items():
        if meaning := names.get(f"{parent}.{name}") or names.get(name):
            found[trainer] = meaning
    return found


def key_hint(key: str, known: Sequence[str]) -> str:
    """Say which known key is meant by `key`, or list the sections."""
    name, nearest = key.rpartition(".")[2], nearest_keys(key, known)
    if meanings := _elsewhere(key, nearest):
        return f"here it is {', or '.join(meanings)}"
    if nearest:
        return f"did you mean {' or '.join(map(repr, nearest))}?"
    section, elsewhere = key.partition(".")[0], "docs/coming-from.md has names of other trainers"
    if "." in key and section in Config.model_fields:
        return f"section {section} has no such key; docs/config.md lists all, {elsewhere}"
    return f"no section has the key {name}: they are {', '.join(Config.model_fields)}; {elsewhere}"


def meant_key(key: str, known: Sequence[str]) -> str | None:
    """The known key that `key` misspells; None if it may be another name."""
    nearest = nearest_keys(key, known)
    return nearest[0] if len(nearest) == 1 and not _elsewhere(key, nearest) else None


def _elsewhere(key: str, nearest: Sequence[str]) -> list[str]:
    """Meanings of another trainer's key that is no misspelling of a section alone."""
    name = key.rpartition(".")[2]
    if len(nearest) == 1 and nearest[0].endswith(f".{name}") and _likeness(key, nearest[0]) >= NEAR:
        return []
    meanings = dict.fromkeys(meanings_of(key).values())
    return [each for each in meanings if not re.match(rf"[\w.]*\.{re.escape(name)}\b(?!\.)", each)]


def nearest_keys(key: str, known: Sequence[str]) -> Sequence[str]:
    """Find the known key that is spelt alike in each part, or all keys with the same last part."""
    likeness = {each: _likeness(key, each) for each in known}
    nearest = max(known, key=lambda each: likeness[each])
    if likeness[nearest] >= NEAR:
        return [nearest]
    return [each for each in known if each.rpartition(".")[2] == key.rpartition(".")[2]]


def _likeness(key: str, candidate: str) -> float:
    """Similarity from 0 to 1 of the less similar part: the section or the name."""
    parts = zip(key.rpartition(".")[::2], candidate.rpartition(".")[::2], strict=True)
    return min(difflib.SequenceMatcher(None, a, b).ratio() for a, b in parts)


def value_hint(key: str, value: str, choices: Sequence[str]) -> tuple[str, list[str]]:
    """Say what a wrong value is here, with the overrides that mean it; empty if unknown."""
    meaning = other_values().get(key, {}).get(value)
    if meaning is None:
        near = difflib.get_close_matches(value, choices, 1, NEAR)
        meaning = f"{key}={near[0]}" if near else ""
    if found := REMEDY.fullmatch(meaning):
        remark = f"{found[1]}: " if found[1] else ""
        return f"{remark}set {found[2]}", [found[2]]
    return meaning, []


def word_hint(word: str, known: Sequence[str]) -> str:
    """Say how a word of the command line, such as --grpo.beta or resume, is given; else empty."""
    key = word.lstrip("-").replace("-", "_")
    if key in known:
        return f"keys are given as {key}=VALUE"
    if meanings := _elsewhere(key, ()):
        return f"here it is {', or '.join(meanings)}"
    return f"keys are given as {meant}=VALUE" if (meant := meant_key(key, known)) else ""


def near_files(path: Path) -> Iterator[Path]:
    """Configs here and in configs/ whose name contains the name of a missing one."""
    for folder in (path.parent, Path("configs")):
        yield from (each for each in sorted(folder.glob("*.y*ml")) if path.stem in each.stem)
