"""Engine arguments from the config: which names are allowed, and the flags that set them.

Also each engine's names for the arguments that planning depends on.
"""

import ast
import difflib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_grpo.config.rollout import RolloutConfig
from megatron_grpo.config.train import ModelConfig


def reason(name: str, refused: Mapping[str, str]) -> str | None:
    """Reason of the first pattern in `refused` that matches the whole `name`; None without one."""
    return next((why for names, why in refused.items() if re.fullmatch(names, name)), None)


def check_names(
    engine: str,
    table: Mapping[str, Any],
    refused: Mapping[str, str],
    own: Collection[str],
    known: Collection[str],
    help_text: str,
) -> None:
    """Check the names in `rollout.<engine>`: ValueError for a pattern of `refused`, an argument
    that a run sets itself (`own`, and its config keys), and a name that is not `known`."""
    keys = dict.fromkeys(own, "a run sets it, by its own keys")
    keys |= {key: f"set model.{key}" for key in ModelConfig.model_fields}
    keys |= {key: f"set rollout.{key}" for key in RolloutConfig.model_fields}
    for name in table:
        if why := reason(name, refused) or keys.get(name):
            raise ValueError(f"rollout.{engine}.{name} cannot be set: {why}")
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
            hint = f": did you mean {nearest[0]}?" if nearest else f": {help_text}"
            title = {"vllm": "vLLM", "sglang": "SGLang"}[engine]
            raise ValueError(f"rollout.{engine}.{name} is not an engine argument of {title}{hint}")


def check_parser(title: str, parser: str | None, known: Collection[str]) -> None:
    """Raise ValueError unless the engine `title` has this parser of tool calls."""
    if parser is not None and parser not in known:
        raise ValueError(
            f"rollout.tool_call_parser {parser}: {title} has {', '.join(sorted(known))}"
        )


def fields_of(source: Path, classes: Collection[str] | None = None) -> frozenset[str]:
    """Public fields of `classes` (None: all) in a file, which is parsed: imports take seconds."""
    found = [
        node
        for node in ast.parse(source.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and (classes is None or node.name in classes)
    ]
    names = {
        field.target.id
        for field in (node for cls in found for node in cls.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }
    return frozenset(name for name in names if not name.startswith("_"))


def command_flags(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Flags of a command line; {"seed": 1, "eager": False, "x": None} gives --seed=1 --no-eager."""
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        match value:
            case None:
                continue
            case True:
                yield flag
            case False:
                yield flag.replace("--", "--no-", 1)
            case list():
                yield from [flag, *map(str, value)]
            case dict():
                yield f"{flag}={json.dumps(value)}"
            case _:
                yield f"{flag}={value}"


@dataclass(frozen=True)
class EngineNode:
    """One node of an engine, by the names of vLLM's options."""

    nnodes: int
    node_rank: int
    master_addr: str
    """Address of node 0: the engine's workers rendezvous there, at `master_port`."""
    master_port: int


ONE_NODE = EngineNode(1, 0, "127.0.0.1", 29501)


@dataclass(frozen=True)
class PlannedArguments:
    """An engine's names for the arguments that a plan reads."""

    memory_fraction: str
    """Fraction of a card for weights and cache."""
    default_fraction: float
    context: str
    """Maximum tokens of a sequence."""
    max_sequences: str
    """Maximum completions at once."""
    spare_context: int = 0
    """Tokens of the context that the engine reserves: a sequence cannot use them."""


PLANNED = {
    "vllm": PlannedArguments("gpu_memory_utilization", 0.92, "max_model_len", "max_num_seqs"),
    # SGLang's default depends on the card: 0.8 to 0.9 of one of 80 GB.
    "sglang": PlannedArguments(
        "mem_fraction_static", 0.85, "context_length", "max_running_requests", spare_context=2
    ),
}


def engine_table(rollout: RolloutConfig) -> Mapping[str, Any]:
    return {"vllm": rollout.vllm, "sglang": rollout.sglang}[rollout.engine]


def engine_number(rollout: RolloutConfig, name: str) -> int | None:
    """Parse an argument as vLLM's command line does: 25.6k is 25,600, and 2M is 2 * 1,024**2.

    None if the engine decides (unset, auto or -1); ValueError for another value.
    """
    words = str(engine_table(rollout).get(name)).strip()
    if words.lower() in ("none", "auto", "-1"):
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgtKMGT]?)", words)
    # Decimals with powers of 1,000 alone, as in vLLM's `human_readable_int`.
    if found is None or ("." in found[1] and not found[2].islower()):
        raise ValueError(
            f"rollout.{rollout.engine}.{name} {words} is not a number: use one such as 4096, or "
            "one with a suffix such as 4K"
        )
    number, letter = found.groups()
    base = 1000 if letter.islower() else 1024
    return int(float(number) * base ** (" kmgt".index(letter.lower()) if letter else 0))
