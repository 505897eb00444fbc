"""Command line: `checkpoint-convert inspect`."""

import sys
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from checkpoint_convert.hf_config import read_shape
from checkpoint_convert.hf_folder import check_weights
from checkpoint_convert.shape import ModelShape

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Weights between Hugging Face folders and Megatron-Core.",
)


@app.callback()
def commands() -> None:
    """Keeps subcommands named while there is only one."""


@app.command()
def inspect(
    folder: Annotated[Path, typer.Argument(help="Hugging Face folder with safetensors.")],
) -> None:
    """Say what FOLDER holds, from headers alone: family, sizes, and whether every tensor is there.

    The exit code is not 0 when the family is not supported or a tensor is missing, unexpected or of
    another shape than config.json says; all of them are listed.
    """
    shape = read_shape(folder)
    places = check_weights(folder, shape)
    Console().print(_table(shape))
    num_parameters = sum(prod(place.shape) for place in places.values())
    print(f"{len(places)} tensors, {num_parameters:,} parameters: complete")


def _table(shape: ModelShape) -> Table:
    table = Table("field", "value", show_header=False, box=None)
    for name, value in asdict(shape).items():
        table.add_row(name, f"{value:,}" if type(value) is int else str(value))
    return table


def main() -> None:
    """Entry point: what a user can mend is one message on stderr and exit code 2."""
    try:
        app()
    except (ValueError, FileNotFoundError) as error:
        print(f"checkpoint-convert: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
