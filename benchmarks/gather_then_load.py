"""The baseline without engine layouts: whole tensors to rank 0, then `load_weights`.

Most trainers do this, and no faster: ranks send to rank 0 only, and never send a replica. From
rank 0 every worker gets every tensor, either from one file in memory that all read, or over its own
connection, as with vLLM's `nccl` backend.
"""

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from checkpoint_convert import ModelShape, hf_tensors
from helpers.engines.vllm_workers import WorkerEngines, WorkerProcess
from helpers.models.conversions import bytes_of
from parallel import Layout, ShardMapping
from parallel.views import as_whole

DTYPE = torch.bfloat16

Tensors = Iterator[tuple[str, Tensor]]


def gather_then_load(
    shape: ModelShape,
    layouts: Sequence[Layout],
    parameters: Mapping[str, Tensor],
    deliver: Callable[[Tensors], None],
) -> None:
    """Gather the weights of all ranks tensor by tensor on rank 0, and `deliver` them there.

    `layouts` are the layouts of all ranks. Collective over all ranks.
    """
    rank = dist.get_rank()
    if rank == 0:
        deliver(_gathered(shape, layouts, parameters))
    else:
        owned = _owned(layouts[rank])
        for name in hf_tensors(shape):
            for piece in owned.get(name, ()):
                dist.send(_values(piece, parameters).contiguous(), 0)
    dist.barrier()


def _gathered(
    shape: ModelShape, layouts: Sequence[Layout], parameters: Mapping[str, Tensor]
) -> Tensors:
    owned = [_owned(layout) for layout in layouts]
    for name, size in hf_tensors(shape).items():
        whole = torch.empty(size, dtype=DTYPE)
        for rank, pieces in enumerate(owned):
            for piece in pieces.get(name, ()):
                target = whole[piece.box.slices]
                if rank == 0:
                    target.copy_(_values(piece, parameters))
                elif target.is_contiguous():
                    dist.recv(target, rank)
                else:
                    received = torch.empty(target.shape, dtype=DTYPE)
                    dist.recv(received, rank)
                    target.copy_(received)
        yield name, whole


def _owned(layout: Layout) -> dict[str, list[ShardMapping]]:
    """Pieces that a rank sends, by whole tensor."""
    owned: dict[str, list[ShardMapping]] = {}
    for piece in layout.pieces:
        if not piece.is_replica:
            owned.setdefault(piece.tensor, []).append(piece)
    return owned


def _values(piece: ShardMapping, parameters: Mapping[str, Tensor]) -> Tensor:
    return as_whole(parameters[piece.local][piece.local_box.slices], piece.axes)


def by_file(tensors: Tensors, file: Path, engines: WorkerEngines) -> None:
    """Write the tensors to `file` in memory, and let all workers load it."""
    save_file(dict(tensors), file)
    engines.call(_load_file, file)
    file.unlink()


def by_network(tensors: Tensors, shape: ModelShape, engines: WorkerEngines) -> None:
    """Send every tensor to every worker while the next one is gathered."""
    num_workers = sum(map(len, engines.addresses))
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as stack:
        loading = stack.enter_context(ThreadPoolExecutor(1)).submit(
            engines.call, _load_received, server.getsockname(), hf_tensors(shape)
        )
        ends = [stack.enter_context(server.accept()[0]) for _ in range(num_workers)]
        # A thread for each worker, so that no worker waits for another.
        senders = [(end, stack.enter_context(ThreadPoolExecutor(1))) for end in ends]
        sent = [
            thread.submit(end.sendall, bytes_of(tensor).numpy())
            for _, tensor in tensors
            for end, thread in senders
        ]
        for sending in sent:
            sending.result()
        loading.result()


def _load_file(process: WorkerProcess, file: Path) -> None:
    with safe_open(file, "pt") as tensors:
        _load(process, ((name, tensors.get_tensor(name)) for name in tensors.keys()))  # noqa: SIM118


def _load_received(
    process: WorkerProcess, address: tuple[str, int], sizes: Mapping[str, tuple[int, ...]]
) -> None:
    with socket.create_connection(address) as connection:
        _load(process, _received(connection, process.plain, sizes))


def _received(
    connection: socket.socket, buffer: Tensor, sizes: Mapping[str, tuple[int, ...]]
) -> Tensors:
    """Yield the tensors one by one, all in `buffer` with its already mapped pages."""
    for name, size in sizes.items():
        data = buffer[: DTYPE.itemsize * prod(size)]
        count = connection.recv_into(data.numpy(), flags=socket.MSG_WAITALL)
        assert count == len(data), f"{name}: {count} of {len(data)} bytes"
        yield name, data.view(DTYPE).view(size)


def _load(process: WorkerProcess, tensors: Tensors) -> None:
    from vllm.config import set_current_vllm_config

    worker: Any = process.worker
    with set_current_vllm_config(worker.vllm_config):
        worker.get_model().load_weights(tensors)
