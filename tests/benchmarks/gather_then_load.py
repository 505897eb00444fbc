"""The way that does without layouts of engines: whole tensors to one rank, a file, `load_weights`.

What most trainers do, and no slower than that: ranks send to rank 0 alone, nobody sends a replica,
and the file is in memory.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from checkpoint_convert import ModelShape, hf_tensors
from parallel import Layout
from parallel.views import as_whole
from worker_engines import WorkerEngines, WorkerProcess


def gather_then_load(
    shape: ModelShape,
    layouts: Sequence[Layout],
    parameters: Mapping[str, Tensor],
    file: Path,
    engines: WorkerEngines,
) -> None:
    """Bring the weights of all ranks, of `layouts`, into the workers; collective over all ranks."""
    rank = dist.get_rank()
    if rank == 0:
        save_file(_gathered(shape, layouts, parameters), file)
        engines.call(_load, file)
        file.unlink()
    else:
        for piece in layouts[rank].pieces:
            if not piece.is_replica:
                values = as_whole(parameters[piece.local][piece.local_box.slices], piece.axes)
                dist.send(values.contiguous(), 0)
    dist.barrier()


def _gathered(
    shape: ModelShape, layouts: Sequence[Layout], parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    whole = {
        name: torch.empty(size, dtype=torch.bfloat16) for name, size in hf_tensors(shape).items()
    }
    for rank, layout in enumerate(layouts):
        for piece in layout.pieces:
            if piece.is_replica:
                continue
            target = whole[piece.tensor][piece.box.slices]
            if rank == 0:
                source = parameters[piece.local][piece.local_box.slices]
                target.copy_(as_whole(source, piece.axes))
            elif target.is_contiguous():
                dist.recv(target, rank)
            else:
                received = torch.empty(target.shape, dtype=target.dtype)
                dist.recv(received, rank)
                target.copy_(received)
    return whole


def _load(process: WorkerProcess, file: Path) -> None:
    from vllm.config import set_current_vllm_config

    worker: Any = process.worker
    with set_current_vllm_config(worker.vllm_config), safe_open(file, "pt") as tensors:
        worker.get_model().load_weights((name, tensors.get_tensor(name)) for name in tensors.keys())  # noqa: SIM118
