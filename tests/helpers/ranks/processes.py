"""Run a function on several real ranks (gloo) and collect their results.

The ranks are forked from a server process that has already imported torch and Megatron-Core, so a
world starts in a fraction of a second. Each call gets new ranks, and all of them are killed on the
first failure or at the time-out.
"""

import multiprocessing
import os
import pickle
import re
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.helpers.ranks.imports"])
WITH_VLLM = forkserver.ForkServer()
"""A second server process with vLLM imported, which takes as long as all other imports."""
WITH_VLLM.set_forkserver_preload(["tests.helpers.engines.vllm_imports"])
STARTING = threading.Lock()


def run_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 120,
    cuda: bool = False,
    with_vllm: bool = False,
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
            with _server(with_vllm):
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


@contextmanager
def _server(with_vllm: bool) -> Iterator[None]:
    """Fork the block's processes from the server, with or without vLLM imported."""
    if not with_vllm:
        yield
        return
    new_process = WITH_VLLM.connect_to_new_process
    with STARTING, patch.object(forkserver, "connect_to_new_process", new_process):
        yield


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
    # vLLM puts sockets there, and a killed rank leaves them behind.
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


# Child processes that talk to their test over a pipe and end with it.


def is_alive(pid: int) -> bool:
    """Whether a process is running; a zombie is not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def shared_memory(pids: list[int]) -> set[Path]:
    """Names of shared memory that the processes have mapped."""
    maps = "".join(Path(f"/proc/{pid}/maps").read_text(encoding="utf-8") for pid in pids)
    return {file for file in map(Path, re.findall(r"/dev/shm/\S+", maps)) if file.exists()}


class Child:
    """A running process and the test's end of its pipe."""

    def __init__(self, process: Any, pipe: Connection) -> None:
        self._process = process
        self.pipe = pipe

    @property
    def pid(self) -> int:
        pid: int = self._process.pid
        return pid

    def say(self, value: Any = None) -> None:
        self.pipe.send(value)

    def hear(self, timeout: float = 30) -> Any:
        assert self.pipe.poll(timeout), "the process has not answered in time"
        return self.pipe.recv()

    def kill(self) -> None:
        """Send SIGKILL and wait until the process is gone."""
        self._process.kill()
        self._process.join()


@contextmanager
def running(function: Callable[..., None], *args: Any) -> Iterator[Child]:
    """Run the module-level `function(pipe, *args)` in another process, and kill it at the end."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=function, args=(theirs, *args))
    process.start()
    theirs.close()
    child = Child(process, ours)
    try:
        yield child
    finally:
        child.kill()
        ours.close()
