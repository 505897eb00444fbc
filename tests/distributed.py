"""Run a function on several real ranks (gloo) and collect their results.

The ranks are forked from a server process that has already imported torch and Megatron-Core, so a
world starts in a fraction of a second. Each call gets new ranks, and all of them are killed on the
first failure or at the time-out.
"""

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.rank_imports"])


def run_ranks(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 120, cuda: bool = False
) -> list[Any]:
    """Call the module-level function `fn(rank, *args)` on `world_size` ranks.

    The ranks see no GPU unless `cuda` is true: then each must take one, and they use NCCL.

    Returns one result per rank. Raises AssertionError with the first failing rank's traceback, or
    TimeoutError after `timeout` seconds. No process or temporary file outlives the call.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world_size):
            receiver, sender = CONTEXT.Pipe(duplex=False)
            process = CONTEXT.Process(
                target=_rank_main, args=(sender, folder, rank, world_size, fn, args, cuda)
            )
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            return _collect(pipes, time.monotonic() + timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(pipes: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"ranks {sorted(waiting.values())} did not answer in time")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                error, results[rank] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                raise AssertionError(f"rank {rank} died without a word") from None
            assert error is None, f"rank {rank} of {len(pipes)} failed:\n{error}"
    return [results[rank] for rank in range(len(pipes))]


def _rank_main(
    sender: Connection,
    folder: str,
    rank: int,
    world_size: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    cuda: bool,
) -> None:
    import torch

    if not cuda:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the server process has not initialized CUDA

    torch.set_num_threads(1)
    # vLLM puts sockets there, which a killed rank leaves behind.
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    try:
        torch.distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=torch.distributed.FileStore(f"{folder}/store", world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        # Plain pickle: torch's pickler would share tensors with a process that is about to end.
        sender.send_bytes(pickle.dumps((None, fn(rank, *args))))
        torch.distributed.barrier()  # keep the sockets open until every peer has finished
    except BaseException:
        sender.send_bytes(pickle.dumps((traceback.format_exc(), None)))
