"""One process of a run, and what it sets up before training: engines, models, pushes of weights."""

from contextlib import ExitStack, closing
from dataclasses import dataclass

import torch

from checkpoint_convert import ModelShape
from megatron_grpo.checkpoints.newest import steps_done
from megatron_grpo.config.config import Config
from megatron_grpo.engine_weights.checksums import loaded_sums, pushed_sender
from megatron_grpo.engines.client import RolloutClient
from megatron_grpo.policy.chunks import describe
from megatron_grpo.policy.model import Policy, unwrapped, weight_sender
from megatron_grpo.policy.quantized import policy_of
from megatron_grpo.policy.reference import Reference, reference_of
from megatron_grpo.policy.residency import Residency
from megatron_grpo.rollout.replay import Replay
from megatron_grpo.rollout.rollouter import Rollouter
from megatron_grpo.watchdog import Watchdog
from megatron_grpo.weight_sync import WeightSync
from parallel.collectives import wait_for_rank_0
from parallel.groups import Groups


@dataclass(frozen=True)
class Run:
    """One process of a run, and what it works with."""

    cfg: Config
    groups: Groups
    device: torch.device
    num_hosts: int
    token: str | None
    """Authorizes requests to the engines in `rollout.base_urls`; only rank 0 talks to them."""
    watchdog: Watchdog

    @property
    def ranks_per_host(self) -> int:
        """Number of trainer ranks on each host."""
        return self.cfg.dims.world_size // self.num_hosts


def open_rollouts(run: Run, shape: ModelShape, stack: ExitStack) -> Rollouter | Replay | None:
    """Start the engines, or open the generations that are replayed; None but on rank 0.

    On return the ranks may take memory: engines that share GPUs have measured what is free, or
    given theirs back.
    """
    cfg = run.cfg
    source: Rollouter | Replay | None = None
    if run.groups.rank == 0 and cfg.train.replay is not None:
        source = Replay(cfg, shape, lambda: run.watchdog.is_preempted)
    elif run.groups.rank == 0:
        rollouter = Rollouter(cfg, shape, run.token, run.ranks_per_host)
        source = stack.enter_context(closing(rollouter))
        rollouter.wait_for_memory()
    if cfg.rollout.enable_sleep_mode or not cfg.rollout.base_urls:
        wait_for_rank_0()
    return source


def build_models(run: Run, shape: ModelShape) -> tuple[Policy, Reference | None]:
    """The policy and, if the loss needs one, the reference; collective."""
    cfg, groups = run.cfg, run.groups
    if steps_done(cfg.train.run_dir / "checkpoints"):  # they have the adapters
        lora = cfg.lora.model_copy(update={"adapter_path": None})
        cfg = cfg.model_copy(update={"lora": lora})
    policy = policy_of(cfg, shape, groups)
    if groups.rank == 0:
        print(describe(unwrapped(policy.chunks[0]), policy.optimizer))
    reference = reference_of(policy, cfg, groups) if cfg.grpo.beta > 0 else None
    for model in (policy, reference):
        for chunk in model.chunks if model else ():
            chunk.register_forward_pre_hook(lambda *_: run.watchdog.tick())
    return policy, reference


def open_weight_sync(
    run: Run, policy: Policy, residency: Residency, engines: RolloutClient | None
) -> WeightSync:
    """What pushes the weights of `policy` to the engines, which only rank 0 has; collective."""
    cfg, shape, groups = run.cfg, policy.shape, run.groups
    weights = weight_sender(policy, groups)
    loaded = loaded_sums(cfg, shape, weights, policy.parameters())
    sender = pushed_sender(policy, weights, cfg, groups)
    return WeightSync(cfg, shape, sender, run.device, run.num_hosts, engines, residency, loaded)
