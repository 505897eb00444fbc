"""The commands that write, print and explain configs; `cli` registers them."""

import re
import textwrap
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any

import typer

from checkpoint_convert.folder import read_json
from checkpoint_convert.text_tower import text_config
from megatron_grpo.command_arguments import ConfigFile, Overrides
from megatron_grpo.config.config import Config
from megatron_grpo.config.data import DataConfig
from megatron_grpo.config.explain import explain as explanation
from megatron_grpo.config.file import dump_config, load_config, parse_config
from megatron_grpo.config.overrides import apply_override
from megatron_grpo.config.section import meaning_of
from megatron_grpo.config.train import ModelConfig
from megatron_grpo.config.yaml_text import dump

PROMPTS = ("prompt", "question", "problem", "messages", "instruction", "query", "input")
ANSWERS = ("answer", "solution", "ground_truth", "final_answer", "target", "label", "output")
"""Usual names of columns, the likeliest first."""

MAX_COMPLETION = 1024
"""Completion tokens of a new config, if they are at most half of the model's positions."""
WIDTH = 96


def init(
    model: Annotated[Path, typer.Option(help="Hugging Face folder of the model.")],
    data: Annotated[
        str, typer.Option(help=".jsonl or .parquet file, a folder of these, or a data set's name.")
    ],
    overrides: Overrides = None,
) -> None:
    """Print a commented config for a model and data.

    Finds the columns of prompts and answers in the first row of the data; data.prompt_column=NAME
    and data.answer_column=NAME name others. Completions are scored by math_answer where that answer
    has a number, else by exact. Overrides are written into the config.

    \b
    Example:
      megatron-grpo init --model models/SmolLM2-135M-Instruct \\
          --data data/sums.jsonl train.num_steps=20 > sums.yaml
      megatron-grpo check sums.yaml
    """
    from megatron_grpo.data.rows import first_row  # pyarrow

    ModelConfig(path=model).check_folder()
    given: dict[str, Any] = {}
    for override in overrides or []:
        apply_override(given, override, Config)
    of_data = {"path": data, **given.get("data", {})}
    defaults = _defaults(model, of_data, first_row(DataConfig.model_validate(of_data)))
    names = dict.fromkeys([*defaults, *given])
    table = {name: defaults.get(name, {}) | given.get(name, {}) for name in names}
    parse_config(deepcopy(table), overrides or [])
    print("\n".join(_commented(table)))


def _defaults(model: Path, data: dict[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a new config, for data with a row such as `row`."""
    columns = {
        key: data[key] if key in data else _column(row, names, key)
        for key, names in (("prompt_column", PROMPTS), ("answer_column", ANSWERS))
    }
    is_number = re.search(r"\d", str(row.get(columns["answer_column"])))
    file = model / "config.json"
    positions = text_config(file, read_json(file)).get("max_position_embeddings", MAX_COMPLETION)
    return {
        "model": {"path": str(model)},
        "data": {"path": data["path"], **columns},
        "train": {"run_dir": f"runs/{model.name}", "num_steps": 100},
        "optimizer": {"lr": 1e-6},
        "grpo": {"num_generations": 8, "generation_batch_size": 64},
        "rollout": {"max_completion_length": min(MAX_COMPLETION, positions // 2)},
        "reward": {"functions": ["math_answer" if is_number else "exact"]},
    }


def _column(row: Mapping[str, Any], names: tuple[str, ...], key: str) -> str:
    """The first of `names` that the row has."""
    for name in names:
        if row.get(name):
            return name
    instead = "" if key == "prompt_column" else ", or null, and reward.functions=[file.py:function]"
    raise ValueError(
        f"no column of {', '.join(row)} is known as the {key}: give data.{key}=NAME{instead}"
    )


def _commented(table: Mapping[str, Any]) -> Iterator[str]:
    """Lines of the config, each key under its docstring."""
    yield "# `megatron-grpo explain KEY` explains any key; docs/config.md lists all."
    yield "# `megatron-grpo plan FILE --suggest --gpus N` lists layouts for the section parallel."
    for name, keys in table.items():
        section: Any = Config.model_fields[name].annotation
        yield ""
        yield from _comment(section.__doc__)
        yield f"{name}:"
        for key, value in keys.items():
            comment = _comment(meaning_of(section.model_fields[key]))
            yield from textwrap.indent("\n".join([*comment, dump({key: value})]), "  ").splitlines()


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="# ", subsequent_indent="# ")


def config(config: ConfigFile, overrides: Overrides = None) -> None:
    """Print CONFIG with its overrides and all defaults.

    The output is a config of the same run, as a run saves it in config.yaml.

    \b
    Example:
      megatron-grpo config configs/grpo_8b.yaml rollout.max_staleness=1 \\
          grpo.old_logprobs=rollout
    """
    print(dump_config(load_config(config, overrides or [])), end="")


def explain(
    names: Annotated[
        list[str],
        typer.Argument(metavar="KEY", help="A key, a section, or another trainer's name."),
    ],
) -> None:
    """Explain KEY: meaning, values, conflicts, names in other trainers.

    KEY is a key such as grpo.beta, its last part, a section, or a name of TRL, verl or ms-swift.

    \b
    Example:
      megatron-grpo explain grpo.beta vllm_mode
    """
    text = "\n\n".join(map(explanation, names))
    for line in text.splitlines():
        indent = "    " if line.startswith("  ") else "  "
        print("\n".join(textwrap.wrap(line, WIDTH, subsequent_indent=indent)))
