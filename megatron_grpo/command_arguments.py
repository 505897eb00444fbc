"""Arguments that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="YAML file; see configs/ for complete examples.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY.SUB=VALUE",
        help="Overrides of keys, for example train.num_steps=3 grpo.beta=0.04",
    ),
]
