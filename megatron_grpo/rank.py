"""One process of a run: process groups, engines, models and pushes of weights."""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from checkpoint_convert import ModelShape
from megatron_grpo.checkpoints.folders import how_ended
from megatron_grpo.checkpoints.newest import steps_done
from megatron_grpo.config.config import Config
from megatron_grpo.config.file import with_file_hashes, with_num_steps
from megatron_grpo.engine_weights.checksums import loaded_sums, pushed_sender
from megatron_grpo.engines.client import RolloutClient
from megatron_grpo.launch.launch import RankPlace
from megatron_grpo.launch.network import check_reachable, choose_interface
from megatron_grpo.launch.run_dir import run_lock
from megatron_grpo.policy.chunks import describe
from megatron_grpo.policy.model import Policy, unwrapped, weight_sender
from megatron_grpo.policy.quantized import policy_of
from megatron_grpo.policy.reference import Reference, reference_of
from megatron_grpo.policy.residency import Residency
from megatron_grpo.rollout.replay import Replay
from megatron_grpo.rollout.services import RolloutServices
from megatron_grpo.watchdog import Limits, Watchdog
from megatron_grpo.weight_sync import WeightSync
from parallel.collectives import broadcast_text, wait_for_rank_0
from parallel.cpu_device import communication_backend, run_near, setup_device
from parallel.groups import Groups, destroy_groups, init_groups
from parallel.store import serve_store
from parallel.words import counted

COLLECTIVE_TIMEOUT = timedelta(days=7)
"""Long enough never to fire first: the watchdog detects hangs, and can tell them from normal waits.

While rank 0 generates, scores, reads or writes, other ranks wait for it in a collective for an
unpredictable time. The watchdog also ends collectives whose peer died.
"""

PREFLIGHT_TIMEOUT = timedelta(hours=1)
"""Maximum wait for rank 0, which may first download and encode the data."""


@dataclass(frozen=True)
class Rank:
    """One process of a run, and its means of working with the others."""

    cfg: Config
    groups: Groups
    device: torch.device
    num_hosts: int
    token: str | None
    """Authorizes requests to the engines in `rollout.base_urls`; only rank 0 makes them."""
    watchdog: Watchdog

    @property
    def ranks_per_host(self) -> int:
        return self.cfg.dims.world_size // self.num_hosts


@contextmanager
def open_rank(cfg: Config, place: RankPlace, token: str | None) -> Iterator[Rank]:
    """Join the other ranks under the watchdog, which ends the process if any of them fails."""
    cfg.dims.check_world_size(place.world_size)
    timeout = PREFLIGHT_TIMEOUT
    if place.rank == 0:
        timeout = timedelta(seconds=cfg.rollout.startup_timeout)
    served = None
    if place.rank == 0 and "TORCHELASTIC_USE_AGENT_STORE" not in os.environ:  # `srun` started it
        if place.num_hosts > 1:
            check_reachable(os.environ["MASTER_ADDR"])
        served = serve_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    # Not left to `init_process_group`: the watchdog needs the store before.
    store, _, _ = next(dist.rendezvous("env://", place.rank, place.world_size, timeout=timeout))
    del served  # now `store` keeps it
    limits = Limits.from_config(cfg, on_gpu=torch.cuda.is_available())
    watchdog = Watchdog(place, store, limits, cfg.train.run_dir, token=token or "")
    checkpoints = cfg.train.run_dir / "checkpoints"
    if place.rank == 0 and not how_ended(checkpoints, cfg.num_steps, cfg.train.hooks):
        print(_beginning(cfg), flush=True)
    lock = run_lock(cfg.train.run_dir) if place.rank == 0 else nullcontext()
    with watchdog, lock:
        device = setup_device(place.local_rank)
        # Not rank 0: its engines and reward workers inherit the CPUs that it may use.
        if device.type == "cuda" and place.rank > 0:
            run_near(device)
        with process_groups(cfg, place, store) as groups:
            cfg = with_rank_0_values(cfg)
            yield Rank(cfg, groups, device, place.num_hosts, token, watchdog)


def with_rank_0_values(cfg: Config) -> Config:
    """Replace the number of steps, the date and the hashes of files by rank 0's: only rank 0 has
    read the data so far. Collective; ValueError on a rank whose files differ from rank 0's."""
    cfg = with_file_hashes(cfg)
    own = [cfg.train.num_steps, cfg.data.date, cfg.grpo.file_sha256]
    # Not through the store, where a stranger could change them unseen.
    steps, date, hashes = json.loads(broadcast_text(json.dumps(own)))
    if wrong := [file for file, own in cfg.grpo.file_sha256.items() if own != hashes[file]]:
        raise ValueError(f"{wrong[0]} on {socket.gethostname()} is not the file that rank 0 has")
    cfg = cfg.model_copy(update={"data": cfg.data.model_copy(update={"date": date})})
    return with_num_steps(cfg, steps)


def _beginning(cfg: Config) -> str:
    if cfg.train.replay is not None:
        engines = f"generations are those of {cfg.train.replay}"
    elif cfg.rollout.base_urls:
        engines = f"engines at {', '.join(cfg.rollout.base_urls)}"
    else:
        count = "an engine starts" if (n := cfg.rollout.num_engines) == 1 else f"{n} engines start"
        engines = f"{count} meanwhile, logs in {cfg.train.run_dir / 'logs'}"
    ranks = counted(cfg.dims.world_size, "rank")
    return f"{cfg.model.path} is loaded on {ranks}, {cfg.dims}; {engines}"


@contextmanager
def process_groups(cfg: Config, place: RankPlace, store: dist.Store) -> Iterator[Groups]:
    """Open the process groups of all ranks, which rendezvous in `store`."""
    store.set_timeout(COLLECTIVE_TIMEOUT)  # NCCL communicators rendezvous there on first use
    if place.num_hosts > 1:
        choose_interface(os.environ, os.environ["MASTER_ADDR"])
    dist.init_process_group(
        communication_backend(),
        timeout=COLLECTIVE_TIMEOUT,
        rank=place.rank,
        world_size=place.world_size,
        store=store,
    )
    dynamic_context = cfg.parallel.dynamic_context_parallel
    # Without `finally`: after a failure the watchdog ends the processes.
    yield init_groups(cfg.dims, COLLECTIVE_TIMEOUT, dynamic_context=dynamic_context)
    # Offloaded NCCL communicators need not come back first, and engines may have their memory:
    # `ncclCommDestroy` waits for no peer, and at the first missing buffer it stops with a warning,
    # but succeeds (commReclaim, NCCL 2.29.7). The end of the process frees the rest.
    destroy_groups()
    dist.destroy_process_group()


def open_rollouts(
    rank: Rank, shape: ModelShape, stack: ExitStack
) -> RolloutServices | Replay | None:
    """Start the engines, or open the generations of a replay; None on ranks other than 0.

    On return the ranks may take memory: engines that share GPUs have measured the free memory, or
    given theirs back.
    """
    cfg = rank.cfg
    source: RolloutServices | Replay | None = None
    if rank.groups.rank == 0 and cfg.train.replay is not None:
        source = Replay(cfg, shape, lambda: rank.watchdog.is_preempted)
    elif rank.groups.rank == 0:
        services = RolloutServices(cfg, shape, rank.token, rank.ranks_per_host)
        source = stack.enter_context(closing(services))
        services.wait_for_memory()
    if cfg.rollout.enable_sleep_mode or not cfg.rollout.base_urls:
        wait_for_rank_0()
    return source


def build_models(rank: Rank, shape: ModelShape) -> tuple[Policy, Reference | None]:
    """Build the policy and, if the loss needs one, the reference; collective."""
    cfg, groups = rank.cfg, rank.groups
    if steps_done(cfg.train.run_dir / "checkpoints"):  # the checkpoint has the adapters
        lora = cfg.lora.model_copy(update={"adapter_path": None})
        cfg = cfg.model_copy(update={"lora": lora})
    policy = policy_of(cfg, shape, groups)
    if groups.rank == 0:
        print(describe(unwrapped(policy.chunks[0]), policy.optimizer))
    reference = reference_of(policy, cfg, groups) if cfg.grpo.beta > 0 else None
    for model in (policy, reference):
        for chunk in model.chunks if model else ():
            chunk.register_forward_pre_hook(rank.watchdog.tick)
    return policy, reference


def open_weight_sync(
    rank: Rank, policy: Policy, residency: Residency, engines: RolloutClient | None
) -> WeightSync:
    """Connect the weights of `policy` to the engines, which only rank 0 has; collective."""
    cfg, shape, groups = rank.cfg, policy.shape, rank.groups
    weights = weight_sender(policy, groups)
    loaded = loaded_sums(cfg, shape, weights, policy.parameters())
    sender = pushed_sender(policy, weights, cfg, groups)
    return WeightSync(cfg, shape, sender, rank.device, rank.num_hosts, engines, residency, loaded)
