"""Command line: `checkpoint-convert import | export | quantize | merge | verify | inspect`."""

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
from typing import Annotated, Any, Literal

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
from checkpoint_convert.merge import merge_adapter
from checkpoint_convert.quantized.scheme import Quantization
from checkpoint_convert.utf8_mode import enter_utf8_mode
from checkpoint_convert.verify import verify_weights
from parallel import ParallelDims

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # both programs of the project look alike
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Convert weights between Hugging Face folders and Megatron-Core checkpoints.

    No tensor is gathered: processes copy boxes of tensors from file to file, 4 MiB at a time.

    \b
    Example:
      checkpoint-convert import --hf Qwen3-8B --out qwen3_8b --tp 8
      checkpoint-convert verify Qwen3-8B qwen3_8b
      checkpoint-convert export --megatron qwen3_8b --out Qwen3-8B-again
    """,
)

DTYPES = {
    None: None,
    "bf16": "BF16",
    "fp16": "F16",
    "fp32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
}
WORKER_LOST, CRASHED = 3, 4  # exit codes
NUM_WORKERS = min(8, os.cpu_count() or 1)


def _size(flag: str, text: str) -> Any:
    return typer.Option(flag, min=1, help=text)


Dtype = Annotated[
    Literal["bf16", "fp16", "fp32", "bfloat16", "float16", "float32"] | None,
    typer.Option(
        metavar="bf16|fp16|fp32", help="Dtype of all weights. Default: each keeps its own."
    ),
]
Quantized = Annotated[
    Quantization,
    typer.Option(
        help="Quantise linear layers: to FP8 in blocks of 128 x 128 (DeepSeek's), to FP8 or INT8 "
        "with a scale per row, or to NVFP4, 4 bits in blocks of 16 (compressed-tensors)."
    ),
]
Ignored = Annotated[
    list[str] | None,
    typer.Option(
        "--ignore",
        help="Module to leave unquantised, or re: and a regular expression of how names begin "
        "(compressed-tensors' ignore); may be repeated.",
    ),
]
Workers = Annotated[int, _size("--workers", "Number of worker processes.")]
TensorSize = Annotated[int, _size("--tp", "Tensor parallel size.")]
PipelineSize = Annotated[int, _size("--pp", "Pipeline parallel size.")]
VirtualSize = Annotated[int, _size("--vpp", "Model chunks per pipeline rank (interleaved 1F1B).")]
ExpertSize = Annotated[int, _size("--ep", "Expert parallel size.")]
ExpertTensorSize = Annotated[
    int | None, typer.Option("--etp", min=1, help="Expert tensor parallel size. Default: --tp.")
]
# For an import, only --tp and --etp matter: each layer and expert is a separate chunk.
CutTensorSize = Annotated[int, _size("--tp", "Tensor parallel size for which chunks are cut.")]
CheckedPipelineSize = Annotated[
    int, _size("--pp", "Pipeline parallel size; only checked, changes nothing.")
]
CheckedVirtualSize = Annotated[int, _size("--vpp", "Model chunks per pipeline rank; only checked.")]
CheckedExpertSize = Annotated[int, _size("--ep", "Expert parallel size; only checked.")]
MaxShardSize = Annotated[str, typer.Option(help="Largest weight file, such as 5GB or 500MB.")]
HfConfig = Annotated[
    Path | None,
    typer.Option(
        help="Folder with config.json and tokenizer, for weights stored without them. "
        "Checkpoints of `import` and of training runs have both in hf_config/."
    ),
]


@app.command("import")
def import_(
    hf: Annotated[Path, typer.Option(help="Folder with safetensors or .bin files.")],
    out: Annotated[Path, typer.Option(help="Checkpoint to write; must not exist.")],
    tp: CutTensorSize = 1,
    pp: CheckedPipelineSize = 1,
    vpp: CheckedVirtualSize = 1,
    ep: CheckedExpertSize = 1,
    etp: ExpertTensorSize = None,
    hf_config: HfConfig = None,
    dtype: Dtype = None,
    workers: Workers = NUM_WORKERS,
) -> None:
    """Convert Hugging Face weights to a Megatron checkpoint.

    The checkpoint (torch_dist) loads at any parallel sizes. Loaded with the same --tp, each rank
    reads exactly its own bytes, whatever --pp, --vpp and --ep are: these are only checked against
    the model. Weights in FP8, INT8, MXFP4 and NVFP4 are dequantised.

    \b
    Example:
      checkpoint-convert import --hf Qwen3-8B --out qwen3_8b --tp 8
    """
    with _completed(out), _progress("import") as progress:
        import_checkpoint(
            hf,
            out,
            _dims(tp, pp, vpp, ep, etp),
            hf_config=hf_config,
            dtype=DTYPES[dtype],
            num_workers=workers,
            progress=progress,
        )


@app.command("export")
def export(
    megatron: Annotated[
        Path,
        typer.Option(help="torch_dist checkpoint, from `import` or checkpoints/step_N of a run."),
    ],
    out: Annotated[Path, typer.Option(help="Hugging Face folder to write; must not exist.")],
    hf_config: HfConfig = None,
    max_shard_size: MaxShardSize = "5GB",
    dtype: Dtype = None,
    quantization: Quantized = "none",
    ignore: Ignored = None,
    workers: Workers = NUM_WORKERS,
) -> None:
    """Convert a Megatron checkpoint to a Hugging Face folder.

    The hashes in the manifest of a run's checkpoint are not verified; a resumed run does that.
    Quantised folders are for vLLM and SGLang: see docs/low-precision.md.

    \b
    Example:
      checkpoint-convert export --megatron runs/math/checkpoints/step_20 --out math_20
    """
    max_shard_bytes = _num_bytes(max_shard_size)
    with _completed(out), _progress("export") as progress:
        export_checkpoint(
            megatron,
            out,
            hf_config=hf_config,
            dtype=DTYPES[dtype],
            quantization=quantization,
            ignore=ignore or (),
            max_shard_bytes=max_shard_bytes,
            num_workers=workers,
            progress=progress,
        )


@app.command()
def quantize(
    hf: Annotated[Path, typer.Option(help="Hugging Face folder of a dense model of text.")],
    out: Annotated[Path, typer.Option(help="Hugging Face folder to write; must not exist.")],
    scheme: Annotated[
        Literal["fp8", "nvfp4"],
        typer.Option(help="FP8 with a scale per matrix, or NVFP4 (W4A4) in blocks of 16."),
    ],
    calibrate: Annotated[
        Path,
        typer.Option(help="JSONL of prompts and completions: completions.jsonl of a run, its end."),
    ],
) -> None:
    """Quantise a model with fixed scales of activations, as NVIDIA's ModelOpt calibrates them.

    Needs the extra `modelopt`, and memory for the whole model: see docs/low-precision.md.

    \b
    Example:
      checkpoint-convert quantize --hf runs/math/hf --out math-fp8 --scheme fp8 \\
          --calibrate runs/math/completions.jsonl
    """
    try:
        from checkpoint_convert.calibration import quantize_folder
    except ModuleNotFoundError as error:
        apart = "without a GPU `make setup-modelopt` and PYTHONPATH=.venv/modelopt"
        raise ValueError(f"{error}: pip install -e '.[modelopt]', or {apart}") from None
    with _completed(out):
        quantize_folder(hf, out, scheme, calibrate)


@app.command()
def merge(
    base: Annotated[Path, typer.Option(help="Hugging Face folder that was adapted.")],
    adapter: Annotated[Path, typer.Option(help="PEFT folder, such as hf/ of a run with lora.r.")],
    out: Annotated[Path, typer.Option(help="Hugging Face folder to write; must not exist.")],
    max_shard_size: MaxShardSize = "5GB",
    dtype: Dtype = None,
    workers: Workers = NUM_WORKERS,
) -> None:
    """Merge a low-rank adapter into the weights of its model.

    Each weight becomes W + s B A, summed in float32 and rounded once: the bits that a run with
    lora.sync=merged pushes.

    \b
    Example:
      checkpoint-convert merge --base Qwen3-8B --adapter runs/math/hf --out Qwen3-8B-math
    """
    max_shard_bytes = _num_bytes(max_shard_size)
    with _completed(out), _progress("merge") as progress:
        merge_adapter(
            base,
            adapter,
            out,
            dtype=DTYPES[dtype],
            max_shard_bytes=max_shard_bytes,
            num_workers=workers,
            progress=progress,
        )


@app.command()
def verify(
    a: Annotated[Path, typer.Argument(metavar="A", help="Hugging Face folder or checkpoint.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another one, in the same format or not.")],
    tolerance: Annotated[
        float | None,
        typer.Option(min=0.0, help="Largest absolute difference. Default: bytes are compared."),
    ] = None,
    hf_config: HfConfig = None,
    workers: Workers = NUM_WORKERS,
) -> None:
    """List the tensors in which two sets of weights differ.

    Config fields that change what the weights compute are compared too.
    The exit code is 0 when both are the same, 1 when they differ, 2 for invalid arguments or
    files, 3 when a worker process was killed, and 4 for an internal error.

    \b
    Example:
      checkpoint-convert verify Qwen3-8B qwen3_8b
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
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="Hugging Face folder or checkpoint.")
    ],
    hf_config: HfConfig = None,
    tp: TensorSize = 1,
    pp: PipelineSize = 1,
    vpp: VirtualSize = 1,
    ep: ExpertSize = 1,
    etp: ExpertTensorSize = None,
) -> None:
    """Show what PATH holds, and how its tensors are split.

    Prints the sizes of the model, by the names of config.json, and dtypes. For a checkpoint of a
    training run, it also prints the step, the completions trained on, the layout that saved it,
    bytes, and the config's model, data and method. Only headers are read, except for a tied model
    that also stores its head: then the embedding and the head are read and compared.

    The exit code is 2 when the model is not supported, when it cannot be split over the given
    sizes, or when a tensor is missing, unexpected or does not have the shape config.json implies.

    \b
    Example:
      checkpoint-convert inspect runs/math/checkpoints/step_100
      checkpoint-convert inspect Qwen3-8B --tp 8
    """
    print_inspection(Console(), path, hf_config, _dims(tp, pp, vpp, ep, etp))


def _dims(tp: int, pp: int, vpp: int, ep: int, etp: int | None) -> ParallelDims:
    """The smallest mesh with these sizes; data = ep, as experts are split over data ranks."""
    return ParallelDims(
        tensor=tp, pipeline=pp, virtual_pipeline=vpp, expert=ep, expert_tensor=etp or tp, data=ep
    )


def _num_bytes(size: str) -> int:
    """Parse a size such as 5GB (5 * 10^9 bytes) or 5GiB (5 * 2^30 bytes)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B", size.strip(), re.IGNORECASE)
    num_bytes = 0
    if match is not None:
        exponent = " KMGT".index(match[2].upper() or " ")
        num_bytes = int(float(match[1]) * (1024 if match[3] else 1000) ** exponent)
    if num_bytes == 0:
        raise ValueError(f"--max-shard-size {size!r} is not a size: write it like 5GB or 500MB")
    return num_bytes


@contextmanager
def _progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr; yields the callback ``(bytes done, total bytes)``."""
    columns = (
        *(TextColumn("{task.description}"), BarColumn(), DownloadColumn()),
        *(TransferSpeedColumn(), TimeRemainingColumn()),
    )
    # Refreshed by the caller: no other thread may be alive while worker processes are forked.
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as bar:
        task = bar.add_task(f"{title}: planning", total=None)

        def update(done: int, total: int) -> None:
            bar.update(task, description=title, completed=done, total=total, refresh=True)

        try:
            yield update
        finally:
            # Planning failed: the error message stands alone, without a bar.
            bar.update(task, visible=bar.tasks[0].total is not None)


@contextmanager
def _completed(out: Path) -> Iterator[None]:
    """Say on stdout that `out` is complete, and how long it took."""
    start = time.monotonic()
    yield
    print(f"{out} is complete, after {time.monotonic() - start:.1f} s")


class _Stopped(BaseException):
    """A signal asked this process to end. Raised so that partially written output is removed."""


def _stop(signum: int, frame: object) -> None:
    raise _Stopped(signal.Signals(signum))


def main() -> None:
    """Entry point. An error that the user can fix is one message on stderr, with exit code 2."""
    enter_utf8_mode()
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, _stop)
    try:
        app()
    except _Stopped as stopped:
        (number,) = stopped.args
        print(f"checkpoint-convert: stopped by {number.name}", file=sys.stderr)
        # The shell's exit code of a process that a signal ended.
        sys.exit(128 + number)
    except BrokenProcessPool:
        print("checkpoint-convert: a worker process was killed: out of memory?", file=sys.stderr)
        sys.exit(WORKER_LOST)
    except (ValueError, OSError) as error:
        print(f"checkpoint-convert: {error}", file=sys.stderr)
        sys.exit(2)
    except Exception:
        traceback.print_exc()
        # Not Python's usual 1, with which `verify` says that weights differ.
        sys.exit(CRASHED)


if __name__ == "__main__":
    main()
