"""What rank 0 alone has of a run: the engines, the prompts, the rewards, and the log."""

from contextlib import ExitStack, closing
from dataclasses import dataclass

from megatron_grpo.batch.experience import Experience
from megatron_grpo.batch.schedule import BatchSchedule
from megatron_grpo.checkpoints.trainer_state import TrainerState
from megatron_grpo.config.config import Config
from megatron_grpo.data.stream import PromptStream
from megatron_grpo.engines.draft_meter import DraftMeter
from megatron_grpo.launch.process import preempted_instead
from megatron_grpo.launch.run_dir import write_whole
from megatron_grpo.policy.export import keep_export
from megatron_grpo.reporting.metrics import StepReport
from megatron_grpo.reporting.runlog import RunLog
from megatron_grpo.reporting.trackers import WANDB_ID_FILE
from megatron_grpo.rollout.generate import RolloutBatch
from megatron_grpo.rollout.group_runner import GroupRunner
from megatron_grpo.rollout.replay import Replay, write_generation
from megatron_grpo.rollout.rollouter import Rollouter
from megatron_grpo.rollout.runner import RolloutRunner, Runner, as_rollout_aborted
from megatron_grpo.timing import PhaseTimer
from megatron_grpo.watchdog import Watchdog


@dataclass(frozen=True)
class RankZero:
    """Rank 0's part of a run, once its checkpoint is loaded; all ranks reach it by `on_rank_0`."""

    cfg: Config
    watchdog: Watchdog
    rollouter: Rollouter | None
    """Has the engines; None with `train.replay`."""
    stream: PromptStream
    log: RunLog
    runner: Runner
    drafts: DraftMeter | None

    @classmethod
    def open(
        cls,
        cfg: Config,
        watchdog: Watchdog,
        source: Rollouter | Replay,
        state: TrainerState,
        stack: ExitStack,
    ) -> "RankZero":
        """Continue the log after the step of `state`.

        `source` is what generations come from. Raises ValueError if the state was saved with other
        prompts.
        """
        stream = source.stream
        state.check_prompts(stream.fingerprint)
        if state.wandb_id is not None:
            write_whole(cfg.train.run_dir / WANDB_ID_FILE, state.wandb_id)
        keep_export(cfg, state.step)  # before the log writes the new config
        log = stack.enter_context(closing(RunLog(cfg, state.step, source.tokenizer)))
        log.begin(len(stream.prompts))
        runner: Runner
        rollouter = None if isinstance(source, Replay) else source
        if isinstance(source, Replay):
            runner = source
        elif cfg.rollout.over_sampling > 1:
            runner = GroupRunner(source, watchdog, log.timeline, state)
        else:
            runner = RolloutRunner(source, watchdog, log.timeline)
        stack.enter_context(closing(runner))
        drafts = None
        if rollouter and cfg.rollout.vllm.get("speculative_config"):
            drafts = DraftMeter(rollouter.engines, are_new=not cfg.rollout.base_urls)
        return cls(cfg, watchdog, rollouter, stream, log, runner, drafts)

    @property
    def with_engines(self) -> Rollouter:
        """The rollouter of a run that makes its generations."""
        assert self.rollouter is not None, "train.replay starts no engines"
        return self.rollouter

    def wait_ready(self) -> None:
        """Return when all engines and reward models answer.

        From then on a preemption cancels what they do.
        """
        with self.log.bar.waiting(self.with_engines.servers.awaited, "answer") as show:
            self.with_engines.wait_ready(show)
        if awaited := self.with_engines.pools.awaited:
            with self.log.bar.waiting(awaited, "answer") as show:
                self.with_engines.pools.wait_ready(show)
        self.watchdog.on_preempt(self.with_engines.cancel)

    def enter(self, phase: str) -> None:
        """Record and show that the step enters `phase`; `timing.IDLE` between phases."""
        self.watchdog.enter(phase)
        self.log.bar.enter(phase)

    def evaluate(self, step: int, timer: PhaseTimer) -> None:
        """Evaluate the weights after `step` optimizer steps, and add the metrics to that step's.

        Does nothing if they are there. Raises Preempted, NoServingEngine and RolloutAborted.
        """
        if self.log.has_evaluation(step):
            return
        with (
            preempted_instead(lambda: self.watchdog.is_preempted),
            as_rollout_aborted(f"the evaluation after step {step}"),
        ):
            evaluated = self.with_engines.evaluations.run(step, timer, self.log.bar.evaluation.show)
        with timer.phase("eval", "log"):
            self.log.evaluation(step, evaluated, timer.metrics()["time/eval"])

    def record(self, step: int, generation: int, batch: RolloutBatch, timer: PhaseTimer) -> None:
        """Log the groups that dynamic sampling replaced in the generation that `step` begins, and
        write that generation if `train.save_generations` says so."""
        if self.cfg.train.save_generations:
            with timer.phase("save"):
                write_generation(self.cfg, generation, batch, self.stream.fingerprint)
        self.log.replaced(
            step,
            [
                scored
                for group in batch.replaced
                for scored in zip(group.samples, group.rewards, group.totals, strict=True)
            ],
        )

    def log_step(
        self,
        step: int,
        metrics: dict[str, float],
        report: StepReport,
        experience: Experience,
        timer: PhaseTimer,
    ) -> None:
        """Log optimizer step `step`, counted from 1, which trained on `experience`."""
        updates = BatchSchedule.of(self.cfg.grpo).updates_per_generation
        metrics["epoch"] = self.stream.epochs(step / updates)
        with timer.phase("log"):
            metrics |= self.drafts.metrics() if self.drafts else {}
            self.log.step(step, metrics, report, experience, timer)
