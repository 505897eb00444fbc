"""Command line: `checkpoint-convert import | export | verify | inspect`."""

import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from checkpoint_convert.hf_to_megatron import import_checkpoint
from checkpoint_convert.inspection import print_inspection
from checkpoint_convert.megatron_to_hf import export_checkpoint
from checkpoint_convert.verify import verify_weights
from parallel import ParallelDims

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="""Weights between Hugging Face folders and Megatron-Core checkpoints.

    Nothing is gathered: processes copy boxes of tensors from file to file, 4 MiB at a time.

    \b
    checkpoint-convert import --hf Qwen3-8B --out qwen3_8b --tp 8
    checkpoint-convert verify Qwen3-8B qwen3_8b
    checkpoint-convert export --megatron qwen3_8b --out Qwen3-8B-again
    """,
)

DTYPES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
WORKER_LOST, CRASHED = 3, 4  # exit codes
NUM_WORKERS = min(8, os.cpu_count() or 1)

Dtype = Annotated[
    Literal["bf16", "fp16", "fp32"] | None,
    typer.Option(help="Convert all weights; by default each stays as it is."),
]
Workers = Annotated[int, typer.Option(min=1, help="Processes that share the work.")]
TensorSize = Annotated[int, typer.Option("--tp", min=1, help="Tensor parallel size.")]
PipelineSize = Annotated[int, typer.Option("--pp", min=1, help="Pipeline parallel size.")]
VirtualSize = Annotated[
    int, typer.Option("--vpp", min=1, help="Model chunks per pipeline rank (interleaved 1F1B).")
]
ExpertSize = Annotated[int, typer.Option("--ep", min=1, help="Expert parallel size.")]
# Of an import: layers and experts are chunks of their own, whichever ranks are to hold them.
CutTensorSize = Annotated[
    int, typer.Option("--tp", min=1, help="Tensor parallel size, for which chunks are cut.")
]
CheckedPipelineSize = Annotated[
    int, typer.Option("--pp", min=1, help="Pipeline parallel size: checked, and changes nothing.")
]
CheckedVirtualSize = Annotated[
    int, typer.Option("--vpp", min=1, help="Model chunks per pipeline rank: likewise.")
]
CheckedExpertSize = Annotated[
    int, typer.Option("--ep", min=1, help="Expert parallel size: likewise.")
]
HfConfig = Annotated[
    Path | None,
    typer.Option(
        help="Folder with config.json and tokenizer, for weights that do not come with them. "
        "Checkpoints of `import` and of training runs do: in hf_config/."
    ),
]


@app.command("import")
def import_(
    hf: Annotated[
        Path, typer.Option(help="Folder with safetensors or .bin files, or a GGUF file.")
    ],
    out: Annotated[Path, typer.Option(help="Checkpoint to write; must not exist.")],
    tp: CutTensorSize = 1,
    pp: CheckedPipelineSize = 1,
    vpp: CheckedVirtualSize = 1,
    ep: CheckedExpertSize = 1,
    hf_config: HfConfig = None,
    dtype: Dtype = None,
    workers: Workers = NUM_WORKERS,
) -> None:
    """Hugging Face weights -> a Megatron-Core checkpoint (torch_dist).

    It loads at any parallel sizes. At this --tp, ranks read exactly their own bytes, at any --pp,
    --vpp and --ep: whether the model can be split over those is checked, and that is all.
    """
    start = time.monotonic()
    with _progress("import") as progress:
        import_checkpoint(
            hf,
            out,
            _dims(tp, pp, vpp, ep),
            hf_config=hf_config,
            dtype=DTYPES[dtype] if dtype else None,
            num_workers=workers,
            progress=progress,
        )
    print(f"{out} is complete, after {time.monotonic() - start:.1f} s")


@app.command("export")
def export(
    megatron: Annotated[
        Path,
        typer.Option(help="torch_dist checkpoint: of `import`, or checkpoints/step_N of a run."),
    ],
    out: Annotated[Path, typer.Option(help="Hugging Face folder to write; must not exist.")],
    hf_config: HfConfig = None,
    max_shard_size: Annotated[
        str, typer.Option(help="Largest weight file, such as 5GB or 500MB.")
    ] = "5GB",
    dtype: Dtype = None,
    workers: Workers = NUM_WORKERS,
) -> None:
    """A Megatron-Core checkpoint (torch_dist) -> a Hugging Face folder.

    The hashes in the manifest of a run's step are not compared: a resumed run does that.
    """
    max_shard_bytes = _num_bytes(max_shard_size)
    start = time.monotonic()
    with _progress("export") as progress:
        export_checkpoint(
            megatron,
            out,
            hf_config=hf_config,
            dtype=DTYPES[dtype] if dtype else None,
            max_shard_bytes=max_shard_bytes,
            num_workers=workers,
            progress=progress,
        )
    print(f"{out} is complete, after {time.monotonic() - start:.1f} s")


@app.command()
def verify(
    a: Annotated[Path, typer.Argument(help="Hugging Face folder, GGUF file or checkpoint.")],
    b: Annotated[Path, typer.Argument(help="Another one, in the same format or not.")],
    tolerance: Annotated[
        float | None,
        typer.Option(min=0.0, help="Largest absolute difference; by default bytes are compared."),
    ] = None,
    hf_config: HfConfig = None,
    workers: Workers = NUM_WORKERS,
) -> None:
    """Compare two sets of weights tensor by tensor and name those that differ.

    Fields of the two configs by which the same weights would compute something else count, too.
    The exit code is 0 when they are the same, 1 when they differ, and another when it cannot say: 2
    for a mistake in what is given, 3 when a worker was killed, 4 for a fault of this program.
    """
    with _progress("verify") as progress:
        differences = verify_weights(
            a,
            b,
            tolerance=tolerance,
            hf_config=hf_config,
            num_workers=workers,
            progress=progress,
        )
    for difference in differences:
        print(difference)
    if differences:
        print(f"differences: {len(differences)}")
        raise typer.Exit(1)
    print("the same" if tolerance is None else f"the same within {tolerance:g}")


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="Hugging Face folder, GGUF file or checkpoint.")],
    hf_config: HfConfig = None,
    tp: TensorSize = 1,
    pp: PipelineSize = 1,
    vpp: VirtualSize = 1,
    ep: ExpertSize = 1,
) -> None:
    """Say what PATH holds: family, sizes, dtypes, how it is cut.

    Only headers are read, but of a tied model that stores its head as well also both tables.

    The exit code is 2 when the model is not supported, when it cannot be split over the given
    sizes, or when a tensor is missing, unexpected or of another shape than config.json says.
    """
    print_inspection(Console(), path, hf_config, _dims(tp, pp, vpp, ep))


def _dims(tp: int, pp: int, vpp: int, ep: int) -> ParallelDims:
    """The smallest mesh of these sizes: experts are split over data-parallel ranks."""
    return ParallelDims(tensor=tp, pipeline=pp, virtual_pipeline=vpp, expert=ep, data=ep)


def _num_bytes(size: str) -> int:
    """Bytes of a size like 5GB (10^9) or 5GiB (2^30)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B", size.strip(), re.IGNORECASE)
    num_bytes = 0
    if match is not None:
        exponent = " KMGT".index(match[2].upper() or " ")
        num_bytes = int(float(match[1]) * (1024 if match[3] else 1000) ** exponent)
    if num_bytes == 0:
        raise ValueError(f"--max-shard-size {size!r} is no size: write it like 5GB or 500MB")
    return num_bytes


@contextmanager
def _progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr that is told (bytes done, bytes in all)."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    # Drawn by the caller: a thread must not be alive while worker processes are forked.
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as bar:
        task = bar.add_task(f"{title}: planning", total=None)

        def update(done: int, total: int) -> None:
            bar.update(task, description=title, completed=done, total=total, refresh=True)

        try:
            yield update
        finally:
            bar.update(task, visible=bar.tasks[0].total is not None)


class _Stopped(BaseException):
    """A signal asked this process to end: raised, so that what is half written is removed."""


def _stop(signum: int, frame: object) -> None:
    raise _Stopped(signal.Signals(signum))


def main() -> None:
    """Entry point: what a user can mend is one message on stderr and exit code 2.

    A fault of ours has its stack and an exit code of its own: that of Python, 1, says that what is
    verified differs.
    """
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, _stop)
    try:
        app()
    except _Stopped as stopped:
        (number,) = stopped.args
        print(f"checkpoint-convert: stopped by {number.name}", file=sys.stderr)
        sys.exit(128 + number)
    except BrokenProcessPool:
        print("checkpoint-convert: a worker process was killed: out of memory?", file=sys.stderr)
        sys.exit(WORKER_LOST)
    except (ValueError, OSError) as error:
        print(f"checkpoint-convert: {error}", file=sys.stderr)
        sys.exit(2)
    except Exception:
        traceback.print_exc()
        sys.exit(CRASHED)


if __name__ == "__main__":
    main()
