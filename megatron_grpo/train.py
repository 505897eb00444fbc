"""The training loop that every rank runs; `rank` sets up what it runs on."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from functools import partial
from typing import NoReturn

import torch
import torch.distributed as dist

from checkpoint_convert import ModelShape, read_shape
from megatron_grpo.algorithm.kl import beta_after
from megatron_grpo.batch.distribute import Minibatches
from megatron_grpo.batch.experience import Experience
from megatron_grpo.batch.kept_values import with_kept_values
from megatron_grpo.batch.prepare import Preparation
from megatron_grpo.batch.schedule import BatchSchedule
from megatron_grpo.checkpoints.checkpointer import Checkpoints
from megatron_grpo.checkpoints.newest import steps_done
from megatron_grpo.checkpoints.trainer_state import Ready, TrainerState
from megatron_grpo.config.config import Config
from megatron_grpo.engines import EnginesLost
from megatron_grpo.evaluation.evaluation import Evaluations, is_due
from megatron_grpo.launch.process import Preempted, preempted_instead
from megatron_grpo.policy.export import export_model, keep_export
from megatron_grpo.policy.model import build_policy, describe, weight_sender
from megatron_grpo.policy.reference import build_reference
from megatron_grpo.policy.skipped_steps import SkippedSteps
from megatron_grpo.reporting.metrics import StepReport, peak_memory
from megatron_grpo.reporting.runlog import RunLog
from megatron_grpo.reporting.tracking import WANDB_ID_FILE, write_whole
from megatron_grpo.rollout.generate import Collected, ExperienceSource
from megatron_grpo.rollout.probe import probe_logprobs
from megatron_grpo.rollout.rollouts import Collector, RolloutPipeline, as_engines_lost, ask_engines
from megatron_grpo.timing import PhaseTimer
from megatron_grpo.train_step import train_step
from megatron_grpo.watchdog import START, Watch
from megatron_grpo.watchdog.watchdog import agree_to_stop
from megatron_grpo.weight_sync import WeightSync
from megatron_grpo.workers.child_process import COLLECTOR
from parallel.groups import Groups
from parallel.microbatches import CostModel


def train(
    cfg: Config,
    groups: Groups,
    device: torch.device,
    num_hosts: int,
    token: str | None,
    watch: Watch,
) -> None:
    """Train from the pretrained weights, or the newest checkpoint, to the exported model.

    Raises Preempted on all ranks, after saving, when any of them has been told to stop.
    """
    if (done := steps_done(cfg.train.run_dir / "checkpoints")) >= cfg.train.num_steps:
        if groups.rank == 0:
            print(f"{cfg.train.run_dir} is complete: {done} of {cfg.train.num_steps} steps")
        return
    with ExitStack() as stack:
        training = Training(cfg, groups, device, num_hosts, token, watch, stack)
        training.start()
        stack.callback(watch.enter, "close")
        stack.push(watch.report)  # runs before the stack stops the engines, which takes seconds
        for step in range(training.first_step, cfg.train.num_steps):
            training.begin_step(step + 1)
            training.stop_if_preempted(step)
            is_new = training.roll_out(step)
            training.rest_engines()
            if is_new:
                training.prepare(step)
            report = training.update(step)
            lost = training.push_unless_lost(step + 1)
            training.log(step + 1, report)
            training.save(step + 1)
            if lost:
                training.save_and_stop(step + 1, lost)


def wait_for_rank_0() -> None:
    """Return on all ranks when rank 0 has called this; waits on the CPU."""
    dist.broadcast(torch.zeros(1), src=0)


def _start_source(
    cfg: Config, shape: ModelShape, token: str | None, num_hosts: int, stack: ExitStack
) -> tuple[ThreadPoolExecutor | None, ExperienceSource]:
    """The thread that makes generations ahead, in an asynchronous run, and what makes them.

    Returns when the ranks may use the GPUs that they share with engines.
    """
    thread = None
    if cfg.rollout.async_generate:  # ends after the source: engines may be its children
        thread = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix=COLLECTOR))
    num_ranks = cfg.dims.world_size // num_hosts
    source = stack.enter_context(closing(ExperienceSource(cfg, shape, token, num_ranks)))
    source.wait_for_memory()
    return thread, source


def _open_log(cfg: Config, state: TrainerState) -> RunLog:
    """The log of the run, continued after the step of `state`."""
    if state.wandb_id is not None:
        write_whole(cfg.train.run_dir / WANDB_ID_FILE, state.wandb_id)
    keep_export(cfg, state.step)  # before the log writes the new config
    return RunLog(cfg, state.step)


class Training:
    """One rank's part of a run. All ranks call the same methods at the same time.

    Only rank 0 has the log and `source`, which owns the engines, the prompts and the rewards.
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
        watch.enter("load")  # a phase in which reading files may take long
        shape = read_shape(cfg.model.path)
        self.batches = BatchSchedule.of(cfg.grpo)
        self.cost = CostModel.transformer(shape.hidden_size)
        self.source: ExperienceSource | None = None
        self._log: RunLog | None = None
        thread = collector = None
        if groups.rank == 0:
            thread, self.source = _start_source(cfg, shape, token, num_hosts, stack)
        if cfg.rollout.enable_sleep_mode or not cfg.rollout.base_urls:
            wait_for_rank_0()  # the engines measure free memory first, or give theirs back
        self._engines_may_be_awake = False
        self.policy = build_policy(cfg, shape, groups)
        if groups.rank == 0:
            print(describe(self.policy))
        self.reference = build_reference(cfg, shape, groups) if cfg.grpo.beta > 0 else None
        for model in (self.policy, self.reference):
            for chunk in model.chunks if model else ():
                chunk.register_forward_pre_hook(lambda *_: watch.tick())
        self.preparation = Preparation(self.policy, self.reference, self.cost, cfg, groups, device)
        self.checkpoints = stack.enter_context(
            closing(Checkpoints(cfg, self.policy, self.reference))
        )
        self.state = self.checkpoints.load()
        watch.enter(START)  # all ranks have loaded
        self.first_step = self.state.step
        self.beta = cfg.grpo.beta
        if cfg.grpo.kl_target is not None and self.state.beta is not None:
            self.beta = self.state.beta
        self.skipped = SkippedSteps(cfg.train.max_skipped_steps, self.state.num_skipped_in_a_row)
        self.weight_sync = stack.enter_context(
            closing(WeightSync(cfg, shape, weight_sender(self.policy, groups), device, num_hosts))
        )
        if self.source:
            self.state.check_prompts(self.source.stream.fingerprint)
            self._log = stack.enter_context(closing(_open_log(cfg, self.state)))
            collector = Collector(self.source, thread, watch, self._log.timeline)
            stack.enter_context(closing(collector))
        self.rollouts = RolloutPipeline(cfg, collector, self.push)
        self.experience: Experience | None = None
        self.news: dict[str, float] = {}
        """Metrics of the generation; logged by the first step that trains on it."""
        self._unlogged: dict[str, float] = {}
        """Metrics of the probe or of an evaluation, which the next logged step reports."""
        self.minibatches: Minibatches = []
        self.timer = self._new_timer()

    def _new_timer(self) -> PhaseTimer:
        return PhaseTimer(self.watch.enter, self._log.timeline.add_step if self._log else None)

    def begin_step(self, step: int) -> None:
        """Attribute what follows to optimizer step `step`, counted from 1."""
        self.watch.begin_step(step)
        if self._log:
            self._log.timeline.step = step

    def start(self) -> None:
        """Push the weights to the engines, compare log-probabilities with theirs, and evaluate if
        due."""
        if self.source:
            self.source.wait_ready()
            self.watch.on_preempt(self.source.cancel)
        self.push(self.first_step)
        experience = ask_engines(
            partial(self.source.probe, self.first_step) if self.source else None,
            partial(self.push, self.first_step),
        )
        self.rest_engines()
        self._unlogged = probe_logprobs(
            experience,
            self.policy,
            self.cost,
            self.cfg,
            self.groups,
            self.device,
        )
        if self.cfg.rollout.enable_sleep_mode:
            self.push(self.first_step)
        # The push, the probe and an evaluation (before the first step, or one that an interrupted
        # run did not get to) count towards no step's time.
        self.timer = self._new_timer()
        if (metrics := self.evaluate(self.first_step)) and self._log:
            metrics["time/eval"] = self.timer.metrics()["time/eval"]
            with self.timer.phase("log"):
                self._log.tracking.amend(self.first_step, metrics)
        self.timer = self._new_timer()
        self._restore_ready()

    def _restore_ready(self) -> None:
        """Restore the generation that was ready, but not trained on yet, when the run was saved."""
        if (ready := self.state.ready) is None:
            return
        collected = None
        with self.timer.phase("load"):
            if self.source:
                prompts = self.source.stream.prompts
                experience = self.checkpoints.load_ready(self.first_step, prompts)
                collected = Collected(experience, ready.metrics)
        self.rollouts.restore(ready.generation, collected)

    def roll_out(self, step: int) -> bool:
        """Get what optimizer step `step`, counted from 0, trains on; False if it is there already.

        A run that was saved in the middle of a generation continues with that generation.
        """
        cursor = self.batches.cursor(step)
        if cursor.starts_generation:
            self._await_generation(cursor.generation, step)
        elif step == self.first_step:
            self._resume_generation(step)
        else:
            return False
        # Before the generation is taken: a checkpoint keeps one that training has not begun.
        self.stop_if_preempted(step)
        if cursor.starts_generation and (collected := self.rollouts.take()):
            self.experience, self.news = collected.experience, collected.metrics
        self.rollouts.ask_ahead(step)
        self.checkpoints.poll()  # finish a checkpoint that was written in the meantime
        return True

    def _await_generation(self, generation: int, step: int) -> None:
        """Wait until the engines have made `generation`, requesting it if that was not done yet."""
        try:
            with suppress(Preempted):  # the caller then stops all ranks
                if self.rollouts.ready != generation:
                    self.rollouts.ask(generation, step)
                    self.rollouts.settle(step, self.timer)
        except EnginesLost as lost:
            self.save_and_stop(step, lost)

    def _resume_generation(self, step: int) -> None:
        """Load the generation in the middle of which the run was saved."""
        with self.timer.phase("load"):
            if self.source:
                prompts = self.source.stream.prompts
                self.experience = self.checkpoints.load_experience(step, prompts)

    def rest_engines(self) -> None:
        """Let engines that share GPUs give their memory to the ranks, until the next push."""
        if not (self.cfg.rollout.enable_sleep_mode and self._engines_may_be_awake):
            return
        with self.timer.phase("sleep"):
            if self.source:
                self.source.engines.sleep()
            wait_for_rank_0()
        self._engines_may_be_awake = False

    def prepare(self, step: int) -> None:
        """Compute what is needed once for all steps that train on the generation of `step`."""
        cursor = self.batches.cursor(step)
        self.minibatches = self.preparation.minibatches(
            self.experience, cursor.generation, self.timer
        )
        if cursor.starts_generation and self.reference and self.cfg.grpo.kl_in_reward:
            self.experience, self.minibatches = self.preparation.subtract_kl(
                self.experience, self.minibatches, cursor.generation, self.beta
            )

    def update(self, step: int) -> StepReport:
        """One optimizer step."""
        minibatch = self.minibatches[self.batches.cursor(step).minibatch]
        with self.timer.phase("train"):
            report = train_step(
                self.policy, minibatch, self.cfg, self.groups, self.skipped, self.beta
            )
            if self.reference:
                self.reference.follow(self.policy, step + 1)
        if (target := self.cfg.grpo.kl_target) is not None:
            report.metrics["beta"] = self.beta
            num, horizon = self.batches.minibatch_size, self.cfg.grpo.kl_horizon
            self.beta = beta_after(self.beta, report.metrics, target, num, horizon)
        self.checkpoints.poll()
        return report

    def push(self, policy_version: int) -> None:
        """Push the current weights to the engines; raises EnginesLost when none are left."""
        if self.cfg.rollout.enable_sleep_mode:
            torch.cuda.empty_cache()  # engines take their memory back once all ranks are here
        self._engines_may_be_awake = True
        engines = self.source.engines if self.source else None
        self.weight_sync.push(self.policy.parameters(), engines, policy_version, self.timer)

    def push_unless_lost(self, policy_version: int) -> EnginesLost | None:
        """Push after a step and evaluate if due; returns EnginesLost, so that the step is logged.

        Does nothing within a generation, where the engines need no new weights, unless an
        evaluation is due or this was the last step.
        """
        is_last = policy_version == self.cfg.train.num_steps
        starts_generation = self.batches.cursor(policy_version).starts_generation
        if not (starts_generation or is_last or is_due(self.cfg, policy_version)):
            return None
        try:
            with suppress(Preempted):  # then all ranks stop before the next step
                self.rollouts.settle(policy_version, self.timer)
                self.push(policy_version)
                self._unlogged |= self.evaluate(policy_version)
                if not is_last:
                    self.rollouts.ask_ahead(policy_version)
        except EnginesLost as lost:
            return lost
        return None

    def evaluate(self, step: int) -> dict[str, float]:
        """Evaluate the engines' weights after `step` optimizer steps, if due; metrics on rank 0.

        Empty if the log already has them. Raises Preempted and EnginesLost, on all ranks.
        """
        if not is_due(self.cfg, step):
            return {}
        evaluate = None
        if self.source and self._log:
            evaluate = partial(self._evaluate, self.source.evaluations, self._log, step)
        return ask_engines(evaluate, partial(self.push, step)) or {}

    def _evaluate(self, evaluations: Evaluations, log: RunLog, step: int) -> dict[str, float]:
        if log.has_evaluation(step):
            return {}
        with (
            preempted_instead(lambda: self.watch.is_preempted),
            as_engines_lost(f"the evaluation after step {step}"),
        ):
            evaluated = evaluations.run(step, self.timer, log.bar.evaluation.show)
        with self.timer.phase("eval", "log"):
            return log.evaluation(step, evaluated, self.cfg.eval)

    def save_and_stop(self, step: int, lost: EnginesLost) -> NoReturn:
        """Save the state at the beginning of `step`, then raise `lost`, on all ranks.

        Raises Preempted instead if any rank was told to stop: engines are told at the same time,
        and may have ended before this was seen.
        """
        self._save_now(step)
        self.stop_if_preempted(step)
        raise lost

    def log(self, step: int, report: StepReport) -> None:
        """Log the report of `step`, counted from 1, with all metrics since the last step's."""
        metrics, self._unlogged = self._unlogged | peak_memory(self.device), {}
        if self._log and self.source and self.experience:
            num_generations = step / self.batches.updates_per_generation
            metrics["epoch"] = self.source.stream.epochs(num_generations)
            if self.batches.cursor(step - 1).starts_generation:
                metrics |= self.news
            with self.timer.phase("log"):
                self._log.step(step, metrics, report, self.experience, self.timer)
                if self.cfg.eval.named_sets and step == self.cfg.train.num_steps:
                    self._log.tell_unless_evaluated(step)
        # Checkpoints are written after the log, so that they never contain a step that it lacks;
        # their time counts towards the next step.
        self.timer = self._new_timer()

    def save(self, step: int) -> None:
        """Export and checkpoint after `step` optimizer steps, if due; always after the last."""
        train = self.cfg.train
        is_last = step == train.num_steps
        saves = is_last or step % train.save_interval == 0
        if saves:
            self._settle_to_save(step)
        with self.timer.phase("save"):
            # The export comes first: a run that resumes from a checkpoint has all exports up to it,
            # and a checkpoint of the last step says that the run is complete.
            if is_last or (train.export_interval and step % train.export_interval == 0):
                name = "hf" if is_last else f"hf_step_{step}"
                export_model(train.run_dir / name, self.policy, self.cfg, self.groups)
            if saves:
                self.checkpoint(step)
            else:
                self.checkpoints.poll()
            if is_last:
                self.checkpoints.wait()  # within the save phase, in which files may take long

    def stop_if_preempted(self, step: int) -> None:
        """If any rank was told to stop, save the state at the beginning of `step` and raise
        Preempted on all ranks."""
        if not agree_to_stop(self.watch.is_preempted, self.device):
            return
        if step > self.checkpoints.newest_step:
            self._settle_to_save(step)
        self._save_now(step)
        saved = f"step {step} saved" if step else "no step was done, nothing is saved"
        raise Preempted(f"preempted: {saved}; the same command resumes")

    def _save_now(self, step: int) -> None:
        """Save the state at the beginning of `step`, unless it was saved, and wait until it is."""
        with self.timer.phase("save"):
            if step > self.checkpoints.newest_step:
                self.checkpoint(step)
            self.checkpoints.wait()

    def _settle_to_save(self, step: int) -> None:
        """Wait for the pending generation if a run resumed after `step` could not request it."""
        try:
            with suppress(Preempted):  # give it up: all ranks stop before the next step
                self.rollouts.settle_to_save(step, self.timer)
        except EnginesLost as lost:
            self.save_and_stop(step, lost)

    def checkpoint(self, step: int) -> None:
        """Start writing the checkpoint of `step`."""
        cursor = self.batches.cursor(step)
        ready, collected = None, self.rollouts.collected
        if self.cfg.rollout.async_generate and self.rollouts.ready is not None and collected:
            ready = Ready(generation=self.rollouts.ready, metrics=collected.metrics)
        wandb_id = self.cfg.train.run_dir / WANDB_ID_FILE
        state = TrainerState(
            step=step,
            num_skipped_in_a_row=self.skipped.num_in_a_row,
            wandb_id=wandb_id.read_text() if wandb_id.exists() else None,
            prompts=self.source.stream.fingerprint if self.source else None,
            beta=self.beta,
            ready=ready,
        )
        present = None
        if not cursor.starts_generation:
            indices = self.batches.minibatches(cursor.generation, self.cfg.train.seed)
            present = with_kept_values(
                self.experience, self.minibatches, indices, self.cfg, self.groups
            )
        self.checkpoints.save(state, present, collected.experience if ready and collected else None)
