"""The training loop, as every rank runs it."""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from checkpoint_convert import read_shape
from megatron_grpo.ask_engines import ask_engines
from megatron_grpo.batching import BatchSchedule
from megatron_grpo.checkpoints.checkpoints import Checkpoints
from megatron_grpo.checkpoints.newest import steps_done
from megatron_grpo.checkpoints.trainer_state import TrainerState
from megatron_grpo.config import Config
from megatron_grpo.exchange import Minibatches, collect_old_logprobs, distribute
from megatron_grpo.experience import Experience, share_out
from megatron_grpo.experience_source import ExperienceSource
from megatron_grpo.export import export_model
from megatron_grpo.launch import RankPlace
from megatron_grpo.logprob_probe import probe_logprobs
from megatron_grpo.model import build_policy, build_reference, weight_sender
from megatron_grpo.preemption import Preempted, agree_to_stop
from megatron_grpo.rollout import EnginesLost
from megatron_grpo.run_lock import run_lock
from megatron_grpo.runlog import RunLog
from megatron_grpo.skipped_steps import SkippedSteps
from megatron_grpo.timing import PhaseTimer
from megatron_grpo.tracking import WANDB_ID_FILE
from megatron_grpo.train_step import add_logprobs, train_step
from megatron_grpo.watch import START, Limits, Watch
from megatron_grpo.weight_sync import WeightSync
from parallel.device import communication_backend, setup_device
from parallel.groups import Groups, destroy_groups, init_groups
from parallel.microbatches import CostModel

COLLECTIVE_TIMEOUT = timedelta(days=7)
"""Never the first to fire: the watch finds what hangs, and knows when a wait is none of that.

While rank 0 generates, scores, reads or writes, the others wait for it in a collective, and nobody
can say for how long. Collectives of a rank that died are ended by the watch as well.
"""


def run_rank(cfg: Config, place: RankPlace, token: str | None) -> None:
    """Join the other ranks and train; returns when all `train.num_steps` steps are done.

    Where they are not, on whichever rank that shows, the process ends in here: see `Watch`. `token`
    opens the engines in `rollout.base_urls`; rank 0 alone speaks to them.
    """
    cfg.dims.check_world_size(place.world_size)
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


def train(
    cfg: Config,
    groups: Groups,
    device: torch.device,
    num_hosts: int,
    token: str | None,
    watch: Watch,
) -> None:
    """From the pretrained weights, or the newest checkpoint, to the exported model.

    Raises Preempted, on all ranks, when one of them has been told to stop and all is saved.
    """
    if (done := steps_done(cfg.train.run_dir / "checkpoints")) >= cfg.train.num_steps:
        if groups.rank == 0:
            print(f"{cfg.train.run_dir} is complete: {done} steps of {cfg.train.num_steps}")
        return
    with ExitStack() as stack:
        training = Training(cfg, groups, device, num_hosts, token, watch, stack)
        metrics = training.start()
        stack.callback(watch.enter, "close")
        stack.push(watch.report)  # before the stack ends the engines, which takes seconds
        for step in range(training.first_step, cfg.train.num_steps):
            watch.begin_step(step + 1)
            training.stop_if_preempted(step)
            training.roll_out(step)
            metrics |= training.update(step)
            lost = training.push_unless_lost(step + 1)
            training.log(step + 1, metrics)
            training.save(step + 1)
            if lost:
                training.save_and_stop(step + 1, lost)
            metrics = {}


class Training:
    """A rank's part of a run: every rank has one, and all call the same method at the same time.

    Rank 0 alone has `source`, which owns the engines, the prompts and the rewards, and the log.
    """

    def __init__(
        self,
        cfg: Config,
        groups: Groups,
        device: torch.device,
        num_hosts: int,
        token: str | None,
        watch: Watch,
        stack: ExitStack,
    ) -> None:
        self.cfg, self.groups, self.device, self.watch = cfg, groups, device, watch
        shape = read_shape(cfg.model.path)
        self.batches = BatchSchedule.of(cfg.grpo)
        self.cost = CostModel.transformer(shape.hidden_size)
        self.source = self._log = None
        if groups.rank == 0:
            self.source = stack.enter_context(closing(ExperienceSource(cfg, shape, token)))
        watch.enter("load")  # where files may take their time
        self.policy = build_policy(cfg, shape, groups)
        self.reference = build_reference(cfg, shape, groups) if cfg.grpo.beta > 0 else None
        for chunk in [*self.policy.chunks, *(self.reference.chunks if self.reference else [])]:
            chunk.register_forward_pre_hook(lambda *_: watch.tick())
        self.checkpoints = stack.enter_context(closing(Checkpoints(cfg, self.policy)))
        self.state = self.checkpoints.load()
        watch.enter(START)  # all ranks have loaded
        self.first_step = self.state.step
        self.skipped = SkippedSteps(cfg.train.max_skipped_steps, self.state.num_skipped_in_a_row)
        self.weight_sync = stack.enter_context(
            closing(WeightSync(cfg, shape, weight_sender(self.policy, groups), device, num_hosts))
        )
        self.prompts: str | None = None
        if self.source:
            self.prompts = self.source.prompts.fingerprint
            self.state.check_prompts(self.prompts)
            if self.state.wandb_id is not None:
                (cfg.train.run_dir / WANDB_ID_FILE).write_text(self.state.wandb_id)
            self._log = stack.enter_context(closing(RunLog(cfg, self.first_step)))
        self.experience: Experience | None = None
        self.minibatches: Minibatches = []
        self.timer = PhaseTimer(self.watch.enter)

    def start(self) -> dict[str, float]:
        """Bring the weights into the engines; metrics of the probe."""
        if self.source:
            self.source.wait_ready()
            self.watch.on_preempt(self.source.cancel)
        self.push(self.first_step)
        experience = ask_engines(
            partial(self.source.probe, self.first_step) if self.source else None,
            partial(self.push, self.first_step),
            self.device,
        )
        probe = probe_logprobs(
            experience,
            self.policy,
            self.cost,
            self.cfg,
            self.groups,
            self.device,
        )
        # The seconds of the push and of the probe are no step's.
        self.timer = PhaseTimer(self.watch.enter)
        return probe

    def roll_out(self, step: int) -> None:
        """Have what optimizer step `step`, counted from 0, trains on.

        A run that was saved inside a generation goes on with that generation.
        """
        cursor = self.batches.cursor(step)
        if not cursor.starts_generation and step != self.first_step:
            return
        if cursor.starts_generation:
            collect = None
            if self.source:
                collect = partial(self._collect, self.source, cursor.generation, step)
            try:
                with suppress(Preempted):  # then all ranks stop below
                    self.experience = ask_engines(collect, partial(self.push, step), self.device)
            except EnginesLost as lost:
                self.save_and_stop(step, lost)
        elif self.source:
            prompts = self.source.prompts.prompts
            self.experience = self.checkpoints.load_experience(step, prompts)
        self.stop_if_preempted(step)
        self.checkpoints.poll()  # so that what was written in the meantime counts from now on
        shares = None
        if self.experience:
            shares = share_out(self.experience, cursor.generation, self.cost, self.cfg)
        minibatches = distribute(shares, self.groups, self.device)
        with self.timer.phase("logprobs"):
            self.minibatches = [
                add_logprobs(minibatch, self.policy, self.reference, self.cfg, self.groups)
                for minibatch in minibatches
            ]

    def _collect(self, source: ExperienceSource, generation: int, step: int) -> Experience:
        """Rank 0: the samples of a generation. Preempted, where somebody wants the machine back."""
        try:
            return source.collect(generation, step, self.timer)
        except Exception as error:
            # Slurm tells engines and what rewards have started to end at the same moment.
            if self.watch.is_preempted:
                raise Preempted(str(error)) from error
            raise

    def update(self, step: int) -> dict[str, float]:
        """One optimizer step; its metrics."""
        minibatch = self.minibatches[self.batches.cursor(step).minibatch]
        with self.timer.phase("train"):
            metrics = train_step(self.policy, minibatch, self.cfg, self.groups, self.skipped)
        self.checkpoints.poll()
        return metrics

    def push(self, policy_version: int) -> None:
        """Have the engines serve the weights as they are now; EnginesLost where there are none."""
        engines = self.source.engines if self.source else None
        self.weight_sync.push(self.policy.parameters(), engines, policy_version, self.timer)

    def push_unless_lost(self, policy_version: int) -> EnginesLost | None:
        """The same after a step, which is to be logged in any case."""
        try:
            with suppress(Preempted):  # then all ranks stop before the next step
                self.push(policy_version)
        except EnginesLost as lost:
            return lost
        return None

    def save_and_stop(self, step: int, lost: EnginesLost) -> NoReturn:
        """Raise `lost`, as all ranks do, when what `step` begins with is saved."""
        with self.timer.phase("save"):
            if step > self.checkpoints.newest_step:
                self.checkpoint(step)
            self.checkpoints.wait()
        raise lost

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Log what happened in `step`, counted from 1."""
        if self._log and self.source and self.experience:
            is_new = self.batches.cursor(step - 1).starts_generation
            if is_new:
                metrics["rollout/num_engines"] = self.source.num_engines
            self._log.step(step, metrics, self.experience, self.timer, is_new=is_new)
        # What follows is after the log, so that a checkpoint never knows of a step that the log
        # does not; its seconds count in the next step.
        self.timer = PhaseTimer(self.watch.enter)

    def save(self, step: int) -> None:
        """Export and checkpoint after `step` optimizer steps, where due; always after the last."""
        train = self.cfg.train
        is_last = step == train.num_steps
        with self.timer.phase("save"):
            # The export comes first: a checkpoint of the last step says that the run is complete.
            if is_last or (train.export_interval and step % train.export_interval == 0):
                export_model(train.run_dir / "hf", self.policy, self.cfg, self.groups)
            if is_last or step % train.save_interval == 0:
                self.checkpoint(step)
            else:
                self.checkpoints.poll()
            if is_last:
                self.checkpoints.wait()  # in here, where files may take their time

    def stop_if_preempted(self, step: int) -> None:
        """Raise Preempted on all ranks if one was told to stop, when what `step` begins with is
        saved."""
        if not agree_to_stop(self.watch.is_preempted, self.device):
            return
        with self.timer.phase("save"):
            if step > self.checkpoints.newest_step:
                self.checkpoint(step)
            self.checkpoints.wait()
        saved = f"step {step} saved" if step else "no step was done, nothing is saved"
        raise Preempted(f"preempted: {saved}; the same command resumes")

    def checkpoint(self, step: int) -> None:
        """Begin to write the checkpoint of `step`."""
        inside = not self.batches.cursor(step).starts_generation
        wandb_id = self.cfg.train.run_dir / WANDB_ID_FILE
        state = TrainerState(
            step=step,
            num_skipped_in_a_row=self.skipped.num_in_a_row,
            wandb_id=wandb_id.read_text() if wandb_id.exists() else None,
            prompts=self.prompts,
        )
        self.checkpoints.save(state, self._with_old_logprobs(step) if inside else None)

    def _with_old_logprobs(self, step: int) -> Experience | None:
        """The generation that is being trained on, with what only the ranks know of it."""
        collected = collect_old_logprobs(self.minibatches, self.groups)
        if self.experience is None or collected is None:
            return None
        generation = self.batches.cursor(step).generation
        indices = self.batches.minibatches(generation, self.cfg.train.seed)
        old: dict[int, Tensor] = {
            indices[minibatch][place]: logprobs
            for of_rank in collected
            for minibatch, found in enumerate(of_rank)
            for place, logprobs in found.items()
        }
        nothing = torch.zeros(0)  # of a sample without a token that the model is trained on
        return replace(
            self.experience,
            old_logprobs=[old.get(i, nothing) for i in range(len(self.experience.samples))],
        )
