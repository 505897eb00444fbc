"""Helpers for tests of conversions: reading weights, and running the command line."""

import json
import os
import pickle
import re
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoint_convert import megatron_layout, read_shape, transfer
from checkpoint_convert.formats.tensor_io import TensorSource, write_box
from checkpoint_convert.formats.torch_dist import read_chunks
from checkpoint_convert.formats.torch_dist_writer import (
    Chunk,
    create_chunks,
    finish_checkpoint,
    index_of,
)
from checkpoint_convert.formats.torch_dtypes import DTYPE_NAMES, DTYPES
from checkpoint_convert.hf_to_megatron import import_checkpoint
from checkpoint_convert.megatron import file_tensors
from checkpoint_convert.megatron_to_hf import export_checkpoint
from checkpoint_convert.weights import read_weights
from helpers.ranks.cli_process import run_main
from helpers.ranks.processes import CONTEXT
from parallel import Box, Layout, ParallelDims, cover_exactly

ONE_RANK = ParallelDims()


def weights_of(folder: Path) -> dict[str, Tensor]:
    """All tensors in the safetensors files of a folder."""
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Assert equal names, shapes, dtypes and bytes."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(bytes_of(found[name]), bytes_of(tensor)), name


def bytes_of(tensor: Tensor) -> Tensor:
    """Raw bytes, in which NaN equals NaN and -0 differs from 0."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def read_tensor(source: TensorSource, name: str, box: Box) -> Tensor:
    """Read a box of a stored tensor."""
    values = torch.empty(box.size, dtype=DTYPES[source.dtypes[name]])
    source.read_into(name, box, values)
    return values


def with_weights(model: Path, folder: Path, weights: Mapping[str, Tensor], **config: Any) -> Path:
    """Copy a model with `weights` in one safetensors file, and `config` merged into its config."""
    shutil.copytree(model, folder)
    save_file(dict(weights), folder / "model.safetensors", {"format": "pt"})
    edit_config(folder, **config)
    return folder


def variant(
    model: Path,
    folder: Path,
    edit: Callable[[dict[str, Tensor]], object] | Mapping[str, Tensor | None] = lambda weights: (
        None
    ),
    **config: Any,
) -> Path:
    """Copy a model with edited weights: `edit` changes a dict, or maps names to tensors (None
    removes one)."""
    weights: dict[str, Any] = weights_of(model)
    if callable(edit):
        edit(weights)
    else:
        weights |= edit
    return with_weights(
        model, folder, {name: x for name, x in weights.items() if x is not None}, **config
    )


def edit_config(folder: Path, **keys: Any) -> None:
    """Change keys of config.json; None removes one."""
    config = config_of(folder) | keys
    config = {key: x for key, x in config.items() if x is not None or key not in keys}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def config_of(folder: Path) -> dict[str, Any]:
    """The config.json of a folder."""
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def rank_parameters(
    folder: Path,
    dims: ParallelDims = ONE_RANK,
    rank: int = 0,
    dtype: torch.dtype = torch.float32,
) -> tuple[Layout, dict[str, Tensor]]:
    """A rank's layout, and its parameters as read from `folder`; NaN where nothing was read."""
    shape = read_shape(folder)
    layout = megatron_layout(shape, dims, dims.coordinates(rank), transformer_engine=False)
    parameters = {n: torch.full(s, torch.nan, dtype=dtype) for n, s in layout.shapes.items()}
    read_weights(folder, shape, layout, parameters)
    return layout, parameters


def round_trip(
    model: Path,
    folder: Path,
    dims: ParallelDims = ONE_RANK,
    *,
    import_dtype: str | None = None,
    **options: Any,
) -> Path:
    """Import `model` to `folder`/checkpoint, then export it with `options` to `folder`/out."""
    import_checkpoint(model, folder / "checkpoint", dims, dtype=import_dtype, num_workers=2)
    export_checkpoint(folder / "checkpoint", folder / "out", num_workers=2, **options)
    return folder / "out"


def random_weights(folder: Path) -> Path:
    """Write a config.json and bfloat16 weights of random, finite bits."""
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in file_tensors(read_shape(folder)).items():
        values = torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16, generator=generator)
        values = torch.where(values & 0x7F80 == 0x7F80, values ^ 0x4000, values)
        weights[name] = values.view(torch.bfloat16)
    save_file(weights, folder / "model.safetensors")
    return folder


def num_bytes_read() -> int:
    """Bytes that this process has requested from the kernel so far."""
    return int(Path("/proc/self/io").read_text(encoding="utf-8").split()[1])


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """Limit the size of files written by this process and its children.

    A write beyond the limit is partial and then fails, as on a full disk.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class Touch:
    """Creates a file when it is unpickled: a pickle can call anything."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return open, (str(self.path), "w")


# Checkpoints of arbitrary tensors, without a model.


def write_checkpoint(
    folder: Path,
    tensors: Mapping[str, Tensor],
    *,
    num_files: int = 1,
    max_elements: int = 1 << 20,
    empty_objects: Sequence[str] = (),
) -> Path:
    """Write a torch_dist checkpoint of whole `tensors`, cut along their first dimensions."""
    folder.mkdir(exist_ok=True)
    chunks = [
        Chunk(key, box, tuple(value.shape), DTYPE_NAMES[value.dtype])
        for key, value in tensors.items()
        for box in Box.whole(tuple(value.shape)).cut(max_elements)
    ]
    created = create_chunks(folder, [chunks[i::num_files] for i in range(num_files)])
    for each in created:
        with each.place.file.open("r+b", buffering=0) as file:
            values = tensors[each.chunk.key][each.chunk.box.slices]
            write_box(file.fileno(), each.place, Box.whole(values.shape), values)
    finish_checkpoint(folder, index_of(created, empty_objects))
    return folder


def edit_metadata(folder: Path, change: Callable[[Any], object]) -> None:
    """Change the index of a checkpoint."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def read_checkpoint(
    folder: Path, keys: Callable[[str], bool] = lambda key: True
) -> dict[str, Tensor]:
    """The whole tensors of a torch_dist checkpoint that `keys` selects."""
    stored = read_chunks(folder, keys)
    cover_exactly(stored.shapes, [stored.layout])
    tensors: dict[str, Tensor] = {}
    with closing(stored.tensors) as chunks:
        for piece in stored.layout.pieces:
            dtype, shape = DTYPES[chunks.dtypes[piece.local]], stored.shapes[piece.tensor]
            target = tensors.setdefault(piece.tensor, torch.empty(shape, dtype=dtype))
            target[piece.box.slices] = read_tensor(chunks, piece.local, piece.local_box)
    return tensors


# The command line. Each call is a process of its own, forked from one that has imported torch.


@dataclass(frozen=True)
class Finished:
    """A finished command."""

    exit_code: int
    output: str
    errors: str

    @property
    def message(self) -> str:
        """Stderr without the progress bar: one line, then indented continuation lines."""
        lines = [line for line in self.errors.splitlines() if line.strip()]
        lines = [line for line in lines if not re.match(r"(import|export|verify) .*\d/\d", line)]
        assert lines, "no message"
        assert lines[0].startswith("checkpoint-convert: "), self.errors
        assert all(line.startswith("  ") for line in lines[1:]), self.errors
        return "\n".join(lines).removeprefix("checkpoint-convert: ")


def run_and_stop_workers(*arguments: Any) -> None:
    """`run_main` with workers that stop themselves (SIGSTOP) as soon as they have started."""
    start = transfer._start_worker

    def start_and_stop(*worker_arguments: Any) -> None:
        start(*worker_arguments)
        os.kill(os.getpid(), signal.SIGSTOP)

    transfer._start_worker = start_and_stop
    run_main(*arguments)


class Command:
    """A running `checkpoint-convert ARGUMENTS`; its stdout and stderr are files in `logs`."""

    def __init__(
        self, *arguments: str | Path, logs: Path, run: Callable[..., None] = run_main
    ) -> None:
        logs.mkdir(exist_ok=True)
        self._files = logs / "stdout", logs / "stderr"
        for file in self._files:
            file.write_text("", encoding="utf-8")
        words = [str(argument) for argument in arguments]
        self._process = CONTEXT.Process(
            target=run, args=("checkpoint_convert.cli", words, *self._files)
        )
        self._process.start()
        self.pid = self._process.pid

    def stopped_workers(self, count: int) -> list[psutil.Process]:
        """Wait until `count` workers have stopped themselves: see `run_and_stop_workers`."""
        deadline = time.monotonic() + 120
        while (
            len(
                stopped := [
                    w for w in psutil.Process(self.pid).children() if w.status() == "stopped"
                ]
            )
            < count
        ):
            assert time.monotonic() < deadline, f"{len(stopped)} workers of {count} were started"
            time.sleep(0.01)
        return stopped

    def finish(self, seconds: float = 60) -> Finished:
        """Wait until the command ends; kill it after `seconds`."""
        self._process.join(seconds)
        is_late = self._process.exitcode is None
        self.kill()
        finished = Finished(
            self._process.exitcode, *(file.read_text(encoding="utf-8") for file in self._files)
        )
        assert not is_late, f"still running after {seconds} s: {finished}"
        return finished

    def kill(self) -> None:
        """SIGKILL the command if it is running, but not its workers."""
        self._process.kill()
        self._process.join()


def run_cli(*arguments: str | Path, logs: Path, seconds: float = 60) -> Finished:
    """Run `checkpoint-convert ARGUMENTS` to its end."""
    return Command(*arguments, logs=logs).finish(seconds)
