"""One rank of a run: it joins the others under the watchdog, and trains."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_grpo.checkpoints.folders import latest_step
from megatron_grpo.config.config import Config
from megatron_grpo.config.file import with_num_steps
from megatron_grpo.launch.launch import RankPlace
from megatron_grpo.launch.run_dir import run_lock
from megatron_grpo.run import Run
from megatron_grpo.train import train
from megatron_grpo.watchdog import Limits, Watchdog
from parallel.cpu_device import communication_backend, run_near, setup_device
from parallel.groups import Groups, destroy_groups, init_groups

COLLECTIVE_TIMEOUT = timedelta(days=7)
"""Long enough never to fire first: the watchdog detects hangs, and can tell them from normal waits.

While rank 0 generates, scores, reads or writes, the others wait for it in a collective for an
unpredictable time. The watchdog also ends collectives whose peer died.
"""

PREFLIGHT_TIMEOUT = timedelta(hours=1)
"""How long ranks wait for rank 0, which may first download and encode the data."""


def run_rank(cfg: Config, place: RankPlace, token: str | None) -> None:
    """Join the other ranks and train; returns when all steps are done.

    If any rank fails, the process ends in here instead: see `Watchdog`. `token` authorizes requests
    to the engines in `rollout.base_urls`; only rank 0 talks to them.
    """
    cfg.dims.check_world_size(place.world_size)
    timeout = PREFLIGHT_TIMEOUT
    if place.rank == 0:
        timeout = timedelta(seconds=cfg.rollout.startup_timeout)
    store, _, _ = next(dist.rendezvous("env://", place.rank, place.world_size, timeout=timeout))
    cfg = as_rank_0_has_it(cfg, place.rank, store)
    limits = Limits.from_config(cfg, on_gpu=torch.cuda.is_available())
    watchdog = Watchdog(place, store, limits, cfg.train.run_dir)
    if place.rank == 0 and latest_step(cfg.train.run_dir / "checkpoints") < cfg.num_steps:
        print(_beginning(cfg), flush=True)
    lock = run_lock(cfg.train.run_dir) if place.rank == 0 else nullcontext()
    with watchdog, lock:
        device = setup_device(place.local_rank)
        if device.type == "cuda" and place.rank > 0:  # rank 0 also has engines and reward workers
            run_near(device)
        with process_groups(cfg, place, store) as groups:
            train(Run(cfg, groups, device, place.num_hosts, token, watchdog))


def as_rank_0_has_it(cfg: Config, rank: int, store: dist.Store) -> Config:
    """`cfg` with the number of steps that `train.num_epochs` are, and the time of the first start:
    rank 0 has read the data and the tokenizer."""
    if rank == 0:
        store.set("num_steps", str(cfg.num_steps))
        store.set("date", cfg.data.date or "")
    date = store.get("date").decode() or None
    cfg = cfg.model_copy(update={"data": cfg.data.model_copy(update={"date": date})})
    return with_num_steps(cfg, int(store.get("num_steps")))


def _beginning(cfg: Config) -> str:
    if cfg.train.replay is not None:
        engines = f"generations are those of {cfg.train.replay}"
    elif cfg.rollout.base_urls:
        engines = f"engines at {', '.join(cfg.rollout.base_urls)}"
    else:
        count = "an engine starts" if (n := cfg.rollout.num_engines) == 1 else f"{n} engines start"
        engines = f"{count} meanwhile, logs in {cfg.train.run_dir / 'logs'}"
    return f"{cfg.model.path} is loaded on {cfg.dims.world_size} ranks, {cfg.dims}; {engines}"


@contextmanager
def process_groups(cfg: Config, place: RankPlace, store: dist.Store) -> Iterator[Groups]:
    """Process groups over all ranks, which rendezvous in `store`.

    Not destroyed when training fails: the watchdog then ends the processes.
    """
    store.set_timeout(COLLECTIVE_TIMEOUT)  # NCCL communicators rendezvous there on first use
    dist.init_process_group(
        communication_backend(),
        timeout=COLLECTIVE_TIMEOUT,
        rank=place.rank,
        world_size=place.world_size,
        store=store,
    )
    dynamic_context = cfg.parallel.dynamic_context_parallel
    yield init_groups(cfg.dims, COLLECTIVE_TIMEOUT, dynamic_context=dynamic_context)
    # If NCCL's communicators are away, they need not come back for this, whose memory engines may
    # have: `ncclCommDestroy` waits for no peer. At the first buffer that is not there it stops, and
    # warns, but succeeds (commReclaim, NCCL 2.29.7); the end of the process frees the rest.
    destroy_groups()
    dist.destroy_process_group()
