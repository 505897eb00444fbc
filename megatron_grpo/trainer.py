"""The training loop that every rank runs; `rank` sets up its surroundings."""

from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_grpo.algorithm.kl import adapted_beta
from megatron_grpo.algorithm.loss_function import LossFunction
from megatron_grpo.batch.advantage_function import AdvantageFunction
from megatron_grpo.batch.distribute import Minibatches
from megatron_grpo.batch.experience import Experience
from megatron_grpo.batch.prepare import Preparation
from megatron_grpo.batch.schedule import BatchSchedule, Cursor
from megatron_grpo.checkpoints.checkpointer import Checkpoints
from megatron_grpo.checkpoints.experience_file import OPEN, ready_prefix
from megatron_grpo.checkpoints.newest import how_ended
from megatron_grpo.checkpoints.trainer_state import Ready, TrainerState
from megatron_grpo.config.train import Hook
from megatron_grpo.config.trained_shape import trained_shape
from megatron_grpo.engine_weights.checksums import pushed_weights
from megatron_grpo.engines.http import RolloutAborted
from megatron_grpo.evaluation.evaluation import due_steps
from megatron_grpo.launch.process import Preempted
from megatron_grpo.launch.run_dir import resumable
from megatron_grpo.policy.export import export_model
from megatron_grpo.policy.residency import build_residency
from megatron_grpo.policy.skipped_steps import SkippedSteps
from megatron_grpo.rank import Rank, build_models, open_rollouts, open_weight_sync
from megatron_grpo.rank_zero import RankZero
from megatron_grpo.reporting.metrics import StepReport, peak_memory
from megatron_grpo.reporting.trackers import WANDB_ID_FILE
from megatron_grpo.rollout.generation import RolloutBatch
from megatron_grpo.rollout.probe import probe_logprobs, sample_probe
from megatron_grpo.rollout.schedule import RolloutScheduler, ask_engines
from megatron_grpo.rollout.services import RolloutServices
from megatron_grpo.timing import PhaseTimer
from megatron_grpo.train_step import profiled_step, train_step
from megatron_grpo.watchdog import START
from parallel.collectives import any_rank, wait_for_rank_0
from parallel.microbatches import CostModel
from parallel.packing import PackedBatch


def train(rank: Rank) -> None:
    """Train from the pretrained weights, or the newest checkpoint, to the exported model.

    Raises Preempted on all ranks, after saving, if any rank is preempted, and RolloutAborted if no
    more generations can be made.
    """
    run_dir = rank.cfg.train.run_dir
    if end := how_ended(run_dir / "checkpoints", rank.cfg.num_steps, rank.cfg.train.hooks):
        if rank.groups.rank == 0:
            print(f"{run_dir} is complete: {end}; its model is {run_dir / 'hf'}")
        return
    with ExitStack() as stack:
        trainer = Trainer(rank, stack)
        try:
            trainer.start()
            stack.callback(rank.watchdog.enter, "close")
            stack.push(rank.watchdog.report)  # runs before the stack stops the engines: seconds
            with resumable(run_dir):
                while trainer.step < trainer.num_steps:
                    trainer.stop_if_preempted()
                    report = trainer.update(trainer.next_minibatch())
                    trainer.log(report)
                    trainer.boundary()
                    trainer.save()
        except (Preempted, RolloutAborted) as reason:
            with resumable(run_dir):
                trainer.save_and_stop(reason)


class Trainer:
    """One rank's part of a run. All ranks call the same methods at the same time.

    `step` counts optimizer steps: it is the step of the current weights, and the number of the next
    step, counted from 0. Only rank 0 has `zero`, the experience and its metrics.
    """

    def __init__(self, rank: Rank, stack: ExitStack) -> None:
        self.rank, self.cfg, cfg = rank, rank.cfg, rank.cfg
        self.schedule, self.num_steps = BatchSchedule.of(cfg.grpo), cfg.num_steps
        self.loss_function = LossFunction.of(cfg.grpo, rank.device)
        self.advantage_function = AdvantageFunction.of(cfg)
        self._stopped_by: Hook | None = None
        """The hook for which `num_steps` was lowered to the current step; only on rank 0."""
        self._due_steps = due_steps(cfg)
        rank.watchdog.enter("load")  # a phase in which reading files may take long
        shape = trained_shape(cfg)
        # Before the models: engines that share GPUs measure the memory that ranks have not taken.
        source = open_rollouts(rank, shape, stack)
        self._engines_are_awake = False
        """Whether engines that share GPUs hold memory that the ranks need."""
        self.policy, self.reference = build_models(rank, shape)
        models = self.policy, self.reference
        self.residency = build_residency(cfg, *models, rank.device, rank.ranks_per_host)
        cost = CostModel.transformer(shape.hidden_size, shape.attending_share)
        self.preparation = Preparation(*models, cost, cfg, rank.groups, rank.device)
        checkpoints = Checkpoints(cfg, *models, self.residency, self._on_checkpoint)
        self.checkpoints = stack.enter_context(closing(checkpoints))
        self.state = self.checkpoints.load()
        self.state.check_base(self.policy.adapters.base if self.policy.adapters else None)
        rank.watchdog.enter(START)  # all ranks have loaded
        self.step = self._first_step = self._exported_step = self.state.step
        self.skipped = SkippedSteps(cfg.train.max_skipped_steps, self.state.num_skipped_in_a_row)
        self.beta = cfg.grpo.beta
        if cfg.grpo.kl_target is not None and self.state.beta is not None:
            self.beta = self.state.beta
        engines = source.engines if isinstance(source, RolloutServices) else None
        sync = open_weight_sync(rank, self.policy, self.residency, engines)
        self.weight_sync = stack.enter_context(closing(sync))
        self.zero: RankZero | None = None
        self._new_timer = partial(PhaseTimer, rank.watchdog.enter)
        if source is not None:
            self.zero = zero = RankZero.open(cfg, rank.watchdog, source, self.state, stack)
            self._new_timer = partial(PhaseTimer, zero.enter, zero.log.timeline.add_step)
        self.rollouts = RolloutScheduler(cfg, self.zero.runner if self.zero else None, self.push)
        self.experience: Experience | None = None
        self.minibatches: Minibatches = []
        self._unlogged: dict[str, float] = {}
        """Metrics of the probe and of new generations, for the next step's log."""
        self.timer = self._new_timer()

    def start(self) -> None:
        """Push the weights, compare log-probabilities with the engines', and evaluate if due."""
        self._restore_generations()  # while engines start
        if self.cfg.train.replay is None:
            self._probe_engines()
        if self.step in self._due_steps:  # an interrupted run did not get to it, or has no step
            self._evaluate()
        self.rollouts.after_push(self.step)
        self._begin_step()

    def _probe_engines(self) -> None:
        if self.zero:
            self.rank.watchdog.enter("load")  # a restored generation has ended this phase
            self.zero.wait_ready()
        self.push(self.step)
        experience = ask_engines(
            self.zero,
            lambda zero: sample_probe(zero.with_engines, self.step),
            lambda: self.push(self.step),
        )
        if self._engines_are_awake:
            self.sleep_engines()
        self._unlogged |= probe_logprobs(experience, self.preparation)
        if self.cfg.rollout.enable_sleep_mode:
            self.push(self.step)  # again: asleep, the engines lost the weights

    def _begin_step(self) -> None:
        """Attribute everything from here on to the next optimizer step, counted from 1 for
        people."""
        step = min(self.step + 1, self.num_steps)
        self.rank.watchdog.begin_step(step)
        if self.zero:
            self.zero.log.timeline.step = step
        self.timer = self._new_timer()

    def _restore_generations(self) -> None:
        """Restore the ready generations that were not trained on, and the samples of unfinished
        ones."""
        state, zero = self.state, self.zero
        if zero is None:
            self.rollouts.ready = {ready.generation: None for ready in state.ready}
        elif state.ready or state.groups:
            load = partial(self.checkpoints.load_experience, self.step, zero.stream.prompts)
            with self.timer.phase("load"):
                for number, ready in enumerate(state.ready):
                    experience = load(ready_prefix(number))
                    assert experience, "the manifest of the checkpoint is right"
                    self.rollouts.ready[ready.generation] = RolloutBatch(experience, ready.metrics)
                if state.groups and (samples := load(OPEN)):
                    zero.runner.restore(state.groups, samples)

    def next_minibatch(self) -> list[PackedBatch]:
        """This rank's microbatches of the next optimizer step."""
        # A run that ended within a generation and is extended makes the generation anew for its
        # remaining steps: the samples are in no checkpoint.
        cursor, begins = self.schedule.cursor(self.step), not self._is_within_generation()
        if begins:
            self.rollouts.await_generation(cursor.generation, self.step, self.timer)
            # Before `pop`: a checkpoint keeps a generation that training has not begun.
            self.stop_if_preempted()
            if batch := self.rollouts.ready.pop(cursor.generation):
                self.experience = batch.experience
                self._unlogged |= batch.metrics
                if self.zero and (batch.replaced or self.cfg.train.save_generations):
                    self.zero.record(self.step + 1, cursor.generation, batch, self.timer)
            self.rollouts.request_ahead(self.step)
            self.checkpoints.poll()  # finish a checkpoint that was written in the meantime
        if self._engines_are_awake:  # an evaluation within a generation wakes them, too
            self.sleep_engines()
        if begins:
            self._prepare(cursor)
        return self.minibatches[cursor.minibatch]

    def _prepare(self, cursor: Cursor) -> None:
        """Compute values needed by all steps that train on the generation, once."""
        self.minibatches = []  # frees the old features of images before new ones are made
        self.minibatches = self.preparation.minibatches(self.experience, cursor, self.timer)
        if self.reference and self.cfg.grpo.kl_in_reward:
            self.experience, self.minibatches = self.preparation.subtract_kl(
                self.experience,
                self.minibatches,
                cursor.generation,
                self.beta,
                self.advantage_function,
            )

    def sleep_engines(self) -> None:
        """Let engines that share GPUs give their memory to the ranks, until the next push."""
        with self.timer.phase("sleep"):
            if self.zero:
                self.zero.with_engines.engines.sleep()
            wait_for_rank_0()
            self.residency.enter("log-probabilities")
        self._engines_are_awake = False

    def update(self, minibatch: list[PackedBatch]) -> StepReport:
        """Train on the microbatches of one optimizer step."""
        self.checkpoints.before_update(self.timer)
        with profiled_step(self.cfg.train, self.step + 1, self.timer), self.timer.phase("train"):
            self.residency.enter("train")
            report = train_step(
                self.policy,
                minibatch,
                self.cfg,
                self.rank.groups,
                self.loss_function,
                self.skipped,
                self.beta,
            )
            is_skipped = report.metrics["skipped_steps"] > 0
            kept = self.preparation.after_step(minibatch, report.logprobs, is_skipped=is_skipped)
            self.minibatches[self.schedule.cursor(self.step).minibatch] = kept
            self.step += 1
            if self.reference and self.cfg.grpo.sync_ref_model:
                self.reference.follow(self.policy, self.step)
            if self._is_boundary():  # the copy overlaps what comes before the push
                self.residency.copy_ahead("push")
        if (target := self.cfg.grpo.kl_target) is not None:
            report.metrics["beta"] = self.beta  # of this step, before it is adapted for the next
            num, horizon = self.schedule.minibatch_size, self.cfg.grpo.kl_horizon
            self.beta = adapted_beta(self.beta, report.metrics, target, num, horizon)
        self.checkpoints.poll()
        return report

    def log(self, report: StepReport) -> None:
        """Log the report of the step, with all metrics since the previous step."""
        metrics, self._unlogged = self._unlogged, {}
        if self.rank.device.type == "cuda":
            metrics |= peak_memory(self.rank.device)
        record: dict[str, Any] = {}
        if self.zero and self.experience:
            record = self.zero.log_step(self.step, metrics, report, self.experience, self.timer)
        # The log comes before the save: no checkpoint then has a step that the log lacks. The
        # hooks, push and save of this step count towards the next one.
        self._begin_step()
        if self.zero:
            self.zero.hooks.call("on_step_end", self.step, record, self.timer)

    def _is_within_generation(self) -> bool:
        """Whether the next step trains on the same generation as the last one."""
        is_between = self.step in (self._first_step, self.num_steps)
        return not (is_between or self.schedule.cursor(self.step).starts_generation)

    def _is_boundary(self) -> bool:
        """Whether a push is due: between generations, or before an evaluation."""
        return not self._is_within_generation() or self.step in self._due_steps

    def boundary(self) -> None:
        """Between two steps: push the new weights, and evaluate if due."""
        if not self._is_boundary():
            return
        self.rollouts.before_push(self.step, self.timer, aborts=self.step in self._due_steps)
        self.push(self.step)
        if self.step in self._due_steps:
            self._evaluate()
        self.rollouts.after_push(self.step)
        if self.step < self.num_steps:
            self.rollouts.request_ahead(self.step)

    def push(self, policy_version: int, timer: PhaseTimer | None = None) -> None:
        """Push the current weights to the engines; raises RolloutAborted if none are left."""
        if self.cfg.train.replay is not None:
            return
        if self.cfg.rollout.enable_sleep_mode:
            torch.cuda.empty_cache()  # engines wake once all ranks are here, and need the memory
            self._engines_are_awake = True
        weights = partial(pushed_weights, self.policy, self.cfg, self.rank.groups)
        self.weight_sync.push(weights, policy_version, timer or self.timer)

    def _evaluate(self) -> None:
        """Evaluate the engines' weights. Its seconds count towards no step."""
        aside = self._new_timer()
        ask_engines(
            self.zero,
            lambda zero: zero.evaluate(self.step, aside),
            lambda: self.push(self.step, aside),
        )
        self.timer.leave_out(aside.metrics()["time/step"])

    def _on_checkpoint(self, step: int, folder: Path) -> None:
        if self.zero:
            self.zero.hooks.call("on_checkpoint", step, folder, self.timer)

    def _stop_if_asked(self) -> None:
        """Make this step the last, on all ranks, if a hook wants the run to end; within a
        generation, which no checkpoint can hold, the run goes on to its end."""
        is_end = self.step in (self._first_step, self.num_steps)
        if not self.cfg.train.hooks or is_end or self._is_within_generation():
            return
        stopped_by = self.zero.hooks.stopped_by if self.zero else None
        if any_rank(stopped_by is not None):
            self.num_steps, self._stopped_by = self.step, stopped_by

    def save(self, *, now: bool = False) -> None:
        """Export and checkpoint, if due; always after the last step."""
        self._stop_if_asked()
        train = self.cfg.train
        is_last = self.step == self.num_steps
        saves = now or is_last or self.schedule.saves_after(self.step, train.save_interval)
        saves = saves and self.step > self.checkpoints.newest_step
        # A resumed run lacks the earlier weights that generations in progress were requested from.
        if saves:
            self.rollouts.finish_for_save(self.step, self.timer)
        with self.timer.phase("save"):
            # The export comes first: a run that resumes from a checkpoint must have all exports up
            # to it, and a checkpoint of the last step marks the run as complete.
            exports = is_last or (train.export_interval and self.step % train.export_interval == 0)
            if exports and self._exported_step < self.step:
                folder = train.run_dir / ("hf" if is_last else f"hf_step_{self.step}")
                export_model(folder, self.policy, self.cfg, self.rank.groups, self.residency)
                self._exported_step = self.step
            if saves:
                self._checkpoint()
            else:
                self.checkpoints.poll()
            if is_last or now:
                self.checkpoints.wait()  # within the save phase, in which files may take long
        if is_last and saves and self.zero:
            self.zero.log.finish(self.step, self._stopped_by)

    def _checkpoint(self) -> None:
        groups, samples, done = self.zero.runner.open_groups() if self.zero else (None, None, {})
        ready = {n: batch for n, batch in sorted((self.rollouts.ready | done).items()) if batch}
        wandb_id = self.cfg.train.run_dir / WANDB_ID_FILE
        state = TrainerState(
            step=self.step,
            num_skipped_in_a_row=self.skipped.num_in_a_row,
            wandb_id=wandb_id.read_text(encoding="utf-8") if wandb_id.exists() else None,
            prompts=self.zero.stream.fingerprint if self.zero else None,
            beta=self.beta,
            base=self.policy.adapters.base if self.policy.adapters else None,
            ready=tuple(Ready(generation=n, metrics=batch.metrics) for n, batch in ready.items()),
            groups=groups,
            stopped_by=self._stopped_by.model_dump() if self._stopped_by else None,
        )
        saved: dict[str, Experience | None] = {OPEN: samples}
        saved |= {ready_prefix(i): each.experience for i, each in enumerate(ready.values())}
        self.checkpoints.save(state, saved, self.zero.log.best_values() if self.zero else {})

    def stop_if_preempted(self) -> None:
        """Raise Preempted on all ranks if any rank is preempted."""
        # Ranks see a signal at different times: without agreement one could stop a step earlier.
        if any_rank(self.rank.watchdog.is_preempted):
            raise Preempted

    def save_and_stop(self, reason: Preempted | RolloutAborted) -> None:
        """Save the state at the end of the generation, and raise `reason` on all ranks.

        The steps up to there need no engines. Raises Preempted if any rank is preempted. Returns if
        the run is complete except for an evaluation.
        """
        with suppress(Preempted, RolloutAborted):
            self.rollouts.finish_for_save(self.step, self.timer)
        self.rollouts.give_up()
        if self.zero and self._is_within_generation() and self.step in self._due_steps:
            self.zero.log.warn_if_not_evaluated(self.step, "its weights are in no checkpoint")
        # Checkpoints lack the samples of a generation in training, so it is trained to its end.
        while self._is_within_generation():
            self.log(self.update(self.next_minibatch()))
            self.save()
        self.save(now=True)
        # Engines get the same signal, and may have ended before a rank saw it.
        is_preempted = any_rank(self.rank.watchdog.is_preempted)
        if isinstance(reason, RolloutAborted) and not is_preempted:
            raise reason
        if self.step < self.num_steps:
            saved = f"step {self.step} saved" if self.step else "no step was done, nothing is saved"
            raise Preempted(f"preempted: {saved}; the same command resumes") from None
