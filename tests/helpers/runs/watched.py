"""Ranks under a `Watchdog`: real processes that a test may kill, stop or signal."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from helpers.ranks.processes import CONTEXT
from megatron_grpo.launch.launch import RankPlace
from megatron_grpo.watchdog.job import Intervals, Limit, Limits

NEVER = Limit(300.0, "never")
LIMITS = Limits(
    start=Limit(60.0, "rollout.startup_timeout"),
    step=Limit(1.5, "train.hang_timeout"),
    push=NEVER,
)
"""Limits of a test; work that must not hit the limit of `step` runs as `generate`."""
INTERVALS = Intervals(heartbeat=0.2, silence=3.0, kill=5.0, grace=0.5, stacks=1.0, unwind=2.0)


@dataclass(frozen=True)
class World:
    """The running ranks of a test."""

    folder: Path
    processes: list[Any]

    def kill(self, rank: int, number: int) -> None:
        os.kill(self.processes[rank].pid, number)

    def wait_for(self, *names: str) -> None:
        """Wait until the ranks have created these files."""
        from helpers.engines.live import (
            wait_until,  # imports transformers, which the ranks do not need
        )

        assert wait_until(lambda: all((self.folder / name).exists() for name in names), 120)

    def exit_codes(self, seconds: float) -> list[int]:
        """Exit codes of all ranks after at most `seconds`; None for a rank that still runs."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return [process.exitcode for process in self.processes]

    def output(self, rank: int) -> str:
        return (self.folder / f"rank_{rank}.log").read_text(encoding="utf-8")

    @property
    def stacks(self) -> str:
        return (self.folder / "logs" / "stacks.txt").read_text(encoding="utf-8")


@contextmanager
def watched_ranks(world_size: int, folder: Path, fn: Callable[..., None], *args: Any) -> Iterator:
    """Run the module-level `fn(watchdog, rank, folder, *args)` in each rank, under its watchdog."""
    processes = [
        CONTEXT.Process(target=_rank_main, args=(rank, world_size, folder, fn, args))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        yield World(folder, processes)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _rank_main(
    rank: int, world_size: int, folder: Path, fn: Callable[..., None], args: tuple[Any, ...]
) -> None:
    import torch.distributed as dist

    from megatron_grpo.watchdog import Watchdog

    # A process started with `&` in a script inherits an ignored SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (1, 2):
        os.dup2(
            os.open(folder / f"rank_{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number
        )
    store = dist.FileStore(str(folder / "store"), world_size)
    place = RankPlace(rank, rank, world_size, num_hosts=1)
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"  # as in a run: a rank may die before others connect
    with Watchdog(place, store, LIMITS, folder, INTERVALS) as watchdog:
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(minutes=10)
        )
        fn(watchdog, rank, folder, *args)
        dist.barrier()
