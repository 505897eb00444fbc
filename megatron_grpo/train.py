"""The training loop, as every rank runs it."""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist

from checkpoint_convert import read_shape
from megatron_grpo import checkpoint
from megatron_grpo.batching import BatchSchedule
from megatron_grpo.config import Config
from megatron_grpo.exchange import Minibatches, distribute
from megatron_grpo.experience import Experience, share_out
from megatron_grpo.experience_source import ExperienceSource
from megatron_grpo.export import export_model
from megatron_grpo.launch import RankPlace
from megatron_grpo.logprob_probe import probe_logprobs
from megatron_grpo.model import Policy, build_policy, build_reference, weight_sender
from megatron_grpo.run_lock import run_lock
from megatron_grpo.runlog import RunLog
from megatron_grpo.timing import PhaseTimer
from megatron_grpo.train_step import add_logprobs, train_step
from megatron_grpo.weight_sync import WeightSync
from parallel.device import communication_backend, setup_device
from parallel.groups import Groups, destroy_groups, init_groups
from parallel.microbatches import CostModel

MARGIN = timedelta(minutes=30)
"""What collectives may take beside the longest wait for an engine or a reward."""


def run_rank(cfg: Config, place: RankPlace, token: str | None) -> None:
    """Join the other ranks and train; returns when all `train.num_steps` steps are done.

    `token` opens the engines in `rollout.base_urls`; rank 0 alone speaks to them.

    Raises ValueError when another run holds the run directory.
    """
    device = setup_device(place.local_rank)
    lock = run_lock(cfg.train.run_dir) if place.rank == 0 else nullcontext()
    with lock, process_groups(cfg, place) as groups:
        train(cfg, groups, device, place.num_hosts, token)


@contextmanager
def process_groups(cfg: Config, place: RankPlace) -> Iterator[Groups]:
    """The mesh over all ranks. When training fails, whoever started the ranks ends them."""
    cfg.dims.check_world_size(place.world_size)
    # While rank 0 waits for an engine, the others wait for rank 0.
    longest_wait = cfg.rollout.startup_timeout + cfg.rollout.request_timeout + cfg.reward.timeout
    timeout = timedelta(seconds=longest_wait) + MARGIN
    dist.init_process_group(
        communication_backend(),
        timeout=timeout,
        rank=place.rank,
        world_size=place.world_size,
    )
    yield init_groups(cfg.dims, timeout)
    destroy_groups()
    dist.destroy_process_group()


def train(
    cfg: Config, groups: Groups, device: torch.device, num_hosts: int, token: str | None
) -> None:
    """From the pretrained weights, or the newest checkpoint, to the exported model."""
    checkpoints = cfg.train.run_dir / "checkpoints"
    if (steps_done := checkpoint.latest_step(checkpoints)) >= cfg.train.num_steps:
        if groups.rank == 0:
            print(f"{cfg.train.run_dir} is complete: {steps_done} steps of {cfg.train.num_steps}")
        return
    shape = read_shape(cfg.model.path)
    batches, cost = BatchSchedule.of(cfg.grpo), CostModel.transformer(shape.hidden_size)
    with ExitStack() as stack:
        # Rank 0 alone owns the engines, the prompts, the rewards and the log.
        source, log = None, None
        if groups.rank == 0:
            source = stack.enter_context(closing(ExperienceSource(cfg, shape, token)))
        policy = build_policy(cfg, shape, groups)
        reference = build_reference(cfg, shape, groups) if cfg.grpo.beta > 0 else None
        first_step = checkpoint.load_latest(checkpoints, policy)
        sender = weight_sender(policy, groups)
        weight_sync = WeightSync(cfg, shape, sender, device, num_hosts)
        stack.enter_context(closing(weight_sync))
        if source:
            log = stack.enter_context(closing(RunLog(cfg, first_step)))
            source.wait_ready()
        # The seconds of this push and of the probe are no step's.
        weight_sync.push(policy.parameters(), source, first_step, PhaseTimer())
        probe = probe_logprobs(source, policy, first_step, cost, cfg, groups, device)

        experience: Experience | None = None
        minibatches: Minibatches = []
        timer = PhaseTimer()
        for step in range(first_step, cfg.train.num_steps):
            cursor = batches.cursor(step)
            # A run that resumes inside a generation makes that generation anew.
            is_new = cursor.starts_generation or step == first_step
            if is_new:
                if source:
                    experience = source.collect(cursor.generation, step, timer)
                shares = share_out(experience, cursor.generation, cost, cfg) if experience else None
                minibatches = distribute(shares, groups, device)
                with timer.phase("logprobs"):
                    minibatches = [
                        add_logprobs(minibatch, policy, reference, cfg, groups)
                        for minibatch in minibatches
                    ]
            with timer.phase("train"):
                minibatch = minibatches[cursor.minibatch]
                metrics = train_step(policy, minibatch, cfg, groups)
            if step == first_step:
                metrics |= probe
            weight_sync.push(policy.parameters(), source, step + 1, timer)
            if log and experience:
                log.step(step + 1, metrics, experience, timer, is_new=is_new)
            # After the log, so that a checkpoint never knows of a step that the log does not; its
            # seconds count in the next step.
            timer = PhaseTimer()
            with timer.phase("save"):
                save(step + 1, policy, cfg, groups)


def save(step: int, policy: Policy, cfg: Config, groups: Groups) -> None:
    """Export and checkpoint after `step` optimizer steps, where due; always after the last."""
    is_last = step == cfg.train.num_steps
    export_interval, save_interval = cfg.train.export_interval, cfg.train.save_interval
    # The export comes first: a checkpoint of the last step says that the run is complete.
    if is_last or (export_interval and step % export_interval == 0):
        export_model(cfg.train.run_dir / "hf", policy, cfg, groups)
    if is_last or step % save_interval == 0:
        folder = cfg.train.run_dir / "checkpoints"
        checkpoint.save(folder, step, policy, cfg.train.keep_checkpoints, cfg.model.path)
