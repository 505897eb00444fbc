"""A rank of a run: it joins the others under the watch, and trains."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta

import torch.distributed as dist

from megatron_grpo.config.config import Config
from megatron_grpo.launch.launch import RankPlace
from megatron_grpo.launch.run_lock import run_lock
from megatron_grpo.train import train
from megatron_grpo.watch import Limits, Watch
from parallel.device import communication_backend, setup_device
from parallel.groups import Groups, destroy_groups, init_groups

COLLECTIVE_TIMEOUT = timedelta(days=7)
"""Never the first to fire: the watch finds what hangs, and knows when a wait is none of that.

While rank 0 generates, scores, reads or writes, the others wait for it in a collective, and nobody
can say for how long. Collectives of a rank that died are ended by the watch as well.
"""

PREFLIGHT_TIMEOUT = timedelta(hours=1)
"""For which ranks wait for rank 0, which may download and encode the data before it comes."""


def run_rank(cfg: Config, place: RankPlace, token: str | None) -> None:
    """Join the other ranks and train; returns when all `train.num_steps` steps are done.

    Where they are not, on whichever rank that shows, the process ends in here: see `Watch`. `token`
    opens the engines in `rollout.base_urls`; rank 0 alone speaks to them.
    """
    cfg.dims.check_world_size(place.world_size)
    timeout = PREFLIGHT_TIMEOUT
    if place.rank == 0:
        timeout = timedelta(seconds=cfg.rollout.startup_timeout)
    store, _, _ = next(dist.rendezvous("env://", place.rank, place.world_size, timeout=timeout))
    watch = Watch(place, store, Limits.of(cfg), cfg.train.run_dir / "logs" / "stacks.txt")
    lock = run_lock(cfg.train.run_dir) if place.rank == 0 else nullcontext()
    with watch, lock:
        device = setup_device(place.local_rank)
        with process_groups(cfg, place, store) as groups:
            train(cfg, groups, device, place.num_hosts, token, watch)


@contextmanager
def process_groups(cfg: Config, place: RankPlace, store: dist.Store) -> Iterator[Groups]:
    """The mesh over all ranks, who meet in `store`. When training fails, the watch ends them."""
    store.set_timeout(COLLECTIVE_TIMEOUT)  # NCCL's communicators meet there when first used
    dist.init_process_group(
        communication_backend(),
        timeout=COLLECTIVE_TIMEOUT,
        rank=place.rank,
        world_size=place.world_size,
        store=store,
    )
    yield init_groups(cfg.dims, COLLECTIVE_TIMEOUT)
    destroy_groups()
    dist.destroy_process_group()
