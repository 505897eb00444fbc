"""Arguments that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from megatron_grpo.config.config import Config
from megatron_grpo.config.explain import default_text
from megatron_grpo.config.section import fields_of


def _complete(incomplete: str) -> list[str]:
    """Keys that begin so, with their defaults."""
    return [
        f"{key}={default_text(field)}"
        for key, field in fields_of(Config)
        if key.startswith(incomplete)
    ]


ConfigFile = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="YAML file; see configs/ for complete examples.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY.SUB=VALUE",
        help="Overrides of keys, for example train.num_steps=3 grpo.beta=0.04",
        autocompletion=_complete,
    ),
]
