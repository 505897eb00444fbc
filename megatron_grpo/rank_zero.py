"""Parts of a run on rank 0 alone: engines, prompts, rewards, and the log."""

from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

from megatron_grpo.batch.experience import Experience
from megatron_grpo.batch.schedule import BatchSchedule
from megatron_grpo.checkpoints.trainer_state import TrainerState
from megatron_grpo.config.config import Config
from megatron_grpo.data.stream import PromptStream
from megatron_grpo.engines.spec_decode_metrics import SpecDecodeMetrics
from megatron_grpo.hooks import Hooks
from megatron_grpo.launch.run_dir import write_whole
from megatron_grpo.policy.export import keep_export
from megatron_grpo.reporting.metrics import StepReport
from megatron_grpo.reporting.runlog import RunLog
from megatron_grpo.reporting.trackers import WANDB_ID_FILE
from megatron_grpo.rollout.generation import RolloutBatch, Runner, as_rollout_aborted
from megatron_grpo.rollout.replay import Replay, write_generation
from megatron_grpo.rollout.runner import GenerationRunner
from megatron_grpo.rollout.services import RolloutServices
from megatron_grpo.timing import PhaseTimer
from megatron_grpo.watchdog import Watchdog


@dataclass(frozen=True)
class RankZero:
    """Rank 0's part of a run, once its checkpoint is loaded; all ranks reach it by `on_rank_0`."""

    cfg: Config
    watchdog: Watchdog
    services: RolloutServices | None
    """The engines and their clients; None with `train.replay`."""
    stream: PromptStream
    log: RunLog
    runner: Runner
    hooks: Hooks
    drafts: SpecDecodeMetrics | None

    @classmethod
    def open(
        cls,
        cfg: Config,
        watchdog: Watchdog,
        source: RolloutServices | Replay,
        state: TrainerState,
        stack: ExitStack,
    ) -> "RankZero":
        """Continue the log after the step of `state`; generations come from `source`. Raises
        ValueError if the state was saved with other prompts."""
        stream = source.stream
        state.check_prompts(stream.fingerprint)
        if state.wandb_id is not None:
            write_whole(cfg.train.run_dir / WANDB_ID_FILE, state.wandb_id)
        is_stopped = state.stopped_by is not None
        keep_export(cfg, state.step, is_stopped=is_stopped)  # before the log writes the new config
        log = stack.enter_context(closing(RunLog(cfg, state.step, source.tokenizer)))
        log.begin(len(stream.prompts))
        runner: Runner
        services = drafts = None
        if isinstance(source, Replay):
            runner = source
        else:
            services, runner = source, GenerationRunner(source, watchdog, log.timeline, state)
        stack.enter_context(closing(runner))
        if services and cfg.rollout.vllm.get("speculative_config"):
            drafts = SpecDecodeMetrics(services.engines, are_new=not cfg.rollout.base_urls)
        return cls(cfg, watchdog, services, stream, log, runner, Hooks(cfg), drafts)

    @property
    def with_engines(self) -> RolloutServices:
        """The services of a run that generates; a replay has none."""
        assert self.services is not None, "train.replay starts no engines"
        return self.services

    def wait_ready(self) -> None:
        """Wait until all engines and reward models answer, and sessions can begin. From then on a
        preemption cancels their work."""
        services = self.with_engines
        with self.log.bar.waiting(services.servers.awaited, "answer") as show:
            services.wait_ready(show)
        if (models := services.pools.servers) and models.awaited:
            with self.log.bar.waiting(models.awaited, "answer") as show:
                models.restart_dead(show)
        services.partners.wait_ready(self.stream.prompts)
        self.watchdog.on_preempt(services.cancel)

    def enter(self, phase: str) -> None:
        """Record and show that the step enters `phase`; `timing.IDLE` between phases."""
        self.watchdog.enter(phase)
        self.log.bar.enter(phase)

    def evaluate(self, step: int, timer: PhaseTimer) -> None:
        """Evaluate the weights after `step` optimizer steps, and add the metrics to that step's.
        Does nothing if the log has them. Raises Preempted, NoServingEngine and RolloutAborted."""
        if self.log.has_evaluation(step):
            return
        what = f"the evaluation after step {step}"
        with as_rollout_aborted(what, lambda: self.watchdog.is_preempted):
            evaluated = self.with_engines.evaluations.run(step, timer, self.log.bar.evaluation.show)
        with timer.phase("eval", "log"):
            metrics = self.log.evaluation(step, evaluated, timer.metrics()["time/eval"])
        self.hooks.call("on_evaluation", step, metrics, timer)

    def record(self, step: int, generation: int, batch: RolloutBatch, timer: PhaseTimer) -> None:
        """Log the groups that dynamic sampling replaced in the generation that `step` begins. With
        `train.save_generations`, also write the generation."""
        if self.cfg.train.save_generations:
            with timer.phase("save"):
                write_generation(self.cfg, generation, batch, self.stream.fingerprint)
        if batch.replaced:
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
    ) -> dict[str, Any]:
        """Log optimizer step `step`, counted from 1, which trained on `experience`; returns its
        record."""
        updates = BatchSchedule.of(self.cfg.grpo).updates_per_generation
        metrics["epoch"] = self.stream.epochs(step / updates)
        with timer.phase("log"):
            metrics |= self.drafts.metrics() if self.drafts else {}
            return self.log.step(step, metrics, report, experience, timer)
