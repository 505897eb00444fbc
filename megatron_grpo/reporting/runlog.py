"""Log of a run on rank 0: terminal, files, and warnings of symptoms (docs/symptoms.md)."""

import math
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import mean
from typing import TYPE_CHECKING, Any

from megatron_grpo.batch.experience import (
    Experience,
    completion_metrics,
    dialogue_metrics,
    source_metrics,
)
from megatron_grpo.batch.schedule import BatchSchedule
from megatron_grpo.checkpoints.folders import best_step
from megatron_grpo.config.config import Config
from megatron_grpo.config.eval import metric_prefix
from megatron_grpo.config.file import dump_config
from megatron_grpo.config.train import Hook
from megatron_grpo.data.samples import Sample, columns_by_prompt, sample_row
from megatron_grpo.evaluation.evaluation import Evaluated, eval_metrics, eval_rows
from megatron_grpo.launch.run_dir import write_whole
from megatron_grpo.reporting.completions import completion_rows, token_rows
from megatron_grpo.reporting.metrics import (
    StepReport,
    gap_metrics,
    reward_metrics,
    staleness_metrics,
)
from megatron_grpo.reporting.progress import ProgressBar
from megatron_grpo.reporting.trackers import open_trackers
from megatron_grpo.reporting.tracking import CONFIG_FILE, Tracking, last_step
from megatron_grpo.timing import TIMELINE_FILE, PhaseTimer, Timeline
from parallel.words import counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RunLog:
    """Writes config, metrics, completions, curves and timeline of a run, and shows progress."""

    def __init__(self, cfg: Config, first_step: int, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.run_dir = cfg.train.run_dir
        self._cfg, self._first_step, self._tokenizer = cfg, first_step, tokenizer
        self._batches = BatchSchedule.of(cfg.grpo)
        self._reward_labels, self._has_dialogues = cfg.reward_labels, cfg.has_dialogues
        self._recent = deque[tuple[float, float]](maxlen=self._batches.updates_per_generation)
        """(tokens, seconds) of the last steps, one generation long."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        write_whole(self.run_dir / CONFIG_FILE, dump_config(cfg))
        self.tracking = Tracking(self.run_dir, first_step, open_trackers(cfg, first_step))
        num_rollouts = cfg.rollout.max_staleness + 1 if cfg.rollout.in_flight_updates else 1
        self.timeline = Timeline(self.run_dir / TIMELINE_FILE, num_rollouts)
        self.timeline.step = first_step
        self.bar = ProgressBar(first_step, cfg.num_steps)
        self.symptoms = Symptoms()

    def step(
        self,
        step: int,
        metrics: dict[str, float],
        report: StepReport,
        experience: Experience,
        timer: PhaseTimer,
    ) -> dict[str, Any]:
        """Log optimizer step `step` (from 1), and its completions if no step has used them yet;
        returns its record in metrics.jsonl."""
        cfg, samples, cursor = self._cfg, experience.samples, self._batches.cursor(step - 1)
        indices = self._batches.minibatches(cursor.generation, cfg.train.seed)[cursor.minibatch]
        updates, times = self._batches.updates_per_generation, timer.metrics()
        compared_version = step - 1
        if cfg.grpo.old_logprobs != "rollout":
            # Old log-probabilities come from the weights at the generation's first step.
            compared_version -= compared_version % updates
        metrics = {
            **metrics,
            **report.metrics,
            **reward_metrics(
                experience.rewards,
                experience.totals,
                experience.group_ids,
                experience.advantages,
                self._reward_labels,
            ),
            **completion_metrics(
                [sample.num_sampled for sample in samples],
                [sample.finish_reason == "length" for sample in samples],
            ),
        }
        if cfg.rollout.max_staleness:
            metrics |= staleness_metrics(cursor.generation, samples, updates, cfg.rollout)
        if cfg.rollout.in_flight_updates:
            own = [samples[i] for i in indices]
            metrics |= gap_metrics(compared_version, own, report.tokens, cfg.rollout)
        throughput = self._tokens_per_second(experience.num_tokens, times["time/step"])
        metrics |= {"tokens_per_second": throughput, **times}
        if self._has_dialogues:
            metrics |= dialogue_metrics(samples, experience.rewards)
        if cfg.sources.by_name:
            metrics |= source_metrics(experience)
        rows = []
        pass_before = step - 1 - cfg.grpo.steps_per_generation
        # In the first pass, or in the first one of this process: a resumed run may have sampled the
        # generation again, with other completions.
        if cursor.iteration == 0 or pass_before < self._first_step:
            rows = completion_rows(
                step, experience, indices, report, cfg.data.prompt_column, self._tokenizer
            )
        tokens = token_rows(step, experience, indices, report.tokens, self._tokenizer)
        record = self.tracking.log(step, metrics, rows, tokens)
        self.bar.show(step, metrics)
        if shown := rows[: cfg.train.print_completions]:
            self.bar.show_completions(shown)
        self.symptoms.check(step, metrics)
        return record

    def replaced(self, step: int, scored: Sequence[tuple[Sample, dict[str, float], float]]) -> None:
        """Log (sample, scores, total) of samples that dynamic sampling replaced before `step`."""
        samples = [sample for sample, _, _ in scored]
        columns = columns_by_prompt(samples, self._cfg.data.prompt_column)
        self.tracking.log_replaced(
            [{"step": step, **sample_row(*of_sample, columns)} for of_sample in scored]
        )

    def _tokens_per_second(self, num_tokens: int, seconds: float) -> float:
        """Throughput over the last steps, one generation long; `num_tokens` is a generation's. Only
        one step of a generation waits for it, so a single step's throughput would jump."""
        self._recent.append((num_tokens / self._batches.updates_per_generation, seconds))
        tokens, times = zip(*self._recent, strict=True)
        return sum(tokens) / sum(times)

    def has_evaluation(self, step: int) -> bool:
        names = [f"{metric_prefix(name)}num_prompts" for name in self._cfg.eval.named_sets]
        return self.tracking.has_metrics(step, names)

    def evaluation(
        self, step: int, evaluated: Mapping[str, Evaluated], seconds: float
    ) -> dict[str, float]:
        """Show and log results of held-out sets by name; their metrics, which are returned, are
        added to the record of `step`."""
        rows: list[dict[str, Any]] = []
        metrics: dict[str, float] = {}
        for name, result in evaluated.items():
            held_out = self._cfg.eval.named_sets[name]
            rows += eval_rows(result, held_out, name)
            metrics |= eval_metrics(result, held_out, name)
            self.bar.show_evaluation(step, name, metrics)
        self.tracking.log_evaluated(step, rows)
        metrics["time/eval"] = seconds
        self.tracking.amend(step, metrics)
        return metrics

    def begin(self, num_prompts: int) -> None:
        first = f", after step {self._first_step}" if self._first_step else ""
        self.bar.tell(
            f"{self._cfg.model.path} on {counted(num_prompts, 'prompt')}{first}; everything is "
            f"recorded in {self.run_dir}"
        )

    def best_values(self) -> dict[int, float]:
        """Values of `train.keep_best` so far, by step; empty without it."""
        metric = self._cfg.train.keep_best
        return self.tracking.values_of(metric) if metric else {}

    def finish(self, step: int, stopped_by: Hook | None) -> None:
        """Print the path of the model or adapter, and the best step; warn if the last step has no
        evaluation."""
        result = model = self.run_dir / "hf"
        kind, end, best = "model", "done", ""
        look = f"look into the run with `megatron-grpo view {self.run_dir}`"
        if stopped_by:
            end = f"stopped by {stopped_by.name} after step {step} of {self._cfg.num_steps}"
        if number := best_step(self.run_dir / "checkpoints"):
            value = self.best_values()[number]
            metric = self._cfg.train.keep_best
            best = f"; the best {metric}, {value:.4g}, is of step {number}, in checkpoints/best"
        if self._cfg.lora.r:
            kind, model, base = "LoRA adapter", self.run_dir / "merged", self._cfg.model.path
            merge = f"checkpoint-convert merge --base {base} --adapter {result} --out {model}"
            look = f"`{merge}` makes a model of it; {look}"
        self.bar.tell(f"{end}: the {kind} is {result}{best}; {look}")
        self.warn_if_not_evaluated(step, f"use `megatron-grpo eval CONFIG model.path={model}`")

    def warn_if_not_evaluated(self, step: int, advice: str) -> None:
        """Warn if `step` lacks its evaluation, which no resumed run would make."""
        if not self.has_evaluation(step):
            text = f"step {step} was not evaluated, as the run or its engines ended: {advice}"
            print(text, file=sys.stderr)

    def close(self) -> None:
        """Finish the records and draw the curves. Failures are printed, not raised: all steps are
        on disk, and another error may be about to set the exit code."""
        self.bar.close()
        with print_failure(f"{TIMELINE_FILE} could not be finished"):
            self.timeline.close()
        with print_failure("the records of the run could not be finished"):
            self.tracking.close()
        # Imported here: matplotlib takes a second, and other ranks do not draw.
        from megatron_grpo.reporting.report import CURVES_FILE, draw_curves  # noqa: PLC0415

        with print_failure(f"{CURVES_FILE} could not be drawn"):
            if last_step(self.run_dir):  # not for an evaluation alone
                draw_curves(self.run_dir)


@contextmanager
def print_failure(what: str) -> Iterator[None]:
    """Print `what` and the error of the block instead of raising it."""
    try:
        yield
    except Exception as error:
        message = error if isinstance(error, OSError) else repr(error)
        print(f"{what}: {message}", file=sys.stderr)


WINDOW = 3
"""Steps of the two averages of a metric: the first steps of this process, and the last ones."""


@dataclass(frozen=True)
class Symptom:
    """Warning about a pattern of one metric."""

    metric: str
    heading: str
    """Anchor in docs/symptoms.md."""
    shows: Callable[[float, float], bool]
    """Test of (mean over the first `WINDOW` steps, mean over the last ones)."""
    message: str
    """Text with the two means as {first} and {last}, and what to change."""
    at_once: float = math.inf
    """Mean that leaves no doubt before there are `WINDOW` steps."""


SYMPTOMS = (
    Symptom(
        "frac_reward_zero_std",
        "nothing-to-learn-from",
        lambda first, last: last >= 0.9,
        "{last:.0%} of the groups have equal rewards, and teach nothing: at the lowest reward, try "
        "the reward functions on an answer that you know is right; at the highest, take harder "
        "rows; in between, raise grpo.num_generations or set grpo.dynamic_sample=true",
        at_once=1.0,
    ),
    Symptom(
        "completions/clipped_ratio",
        "completions-are-cut",
        lambda first, last: last >= 0.5,
        "{last:.0%} of the completions reached rollout.max_completion_length: raise it, or find "
        "out why they do not end (rollout.stop_token_ids, the chat template)",
        at_once=0.9,
    ),
    Symptom(
        "entropy",
        "entropy-collapses",
        lambda first, last: last < first / 10,
        "the entropy fell from {first:.2g} to {last:.2g}: raise grpo.epsilon_high or "
        "grpo.entropy_coef, or lower optimizer.lr",
    ),
    Symptom(
        "completions/mean_length",
        "completions-grow",
        lambda first, last: last > 3 * first,
        "completions grew from {first:.0f} to {last:.0f} tokens: unless the reward rises, add the "
        "reward soft_overlong; grpo.loss_type=grpo favours long wrong ones, dapo does not",
    ),
    Symptom(
        "rollout/logprob_gap_mean",
        "engine-and-trainer-drift-apart",
        lambda first, last: last > max(3 * first, 0.05),
        "log-probabilities of engine and trainer differ by {last:.2g}, at first by {first:.2g}: "
        "set grpo.rollout_importance_sampling_mode, and for experts rollout.router_replay=true",
    ),
    Symptom(
        "grad_norm",
        "the-gradient-grows",
        lambda first, last: last > max(10 * first, 1.0),
        "the gradient norm rose from {first:.2g} to {last:.2g}: lower optimizer.lr",
    ),
    Symptom(
        "kl",
        "the-kl-divergence-explodes",
        lambda first, last: last > max(2 * first, 1.0),
        "the KL divergence rose from {first:.2g} to {last:.2g}: raise grpo.beta, or lower "
        "optimizer.lr",
    ),
    Symptom(
        "clip_ratio/region_mean",
        "updates-are-clipped",
        lambda first, last: last > max(2 * first, 0.2),
        "{last:.0%} of the tokens are clipped, at first {first:.0%}: lower optimizer.lr, "
        "grpo.num_iterations or grpo.steps_per_generation",
    ),
    Symptom(
        "tokens_per_second",
        "steps-become-slower",
        lambda first, last: last < first / 3,
        "throughput fell from {first:.0f} to {last:.0f} tokens per second: compare time/* of an "
        "early and a late step, and rollout/num_engines",
    ),
)


class Symptoms:
    """Checks the metrics of each step of this process; prints each symptom once."""

    def __init__(self) -> None:
        self._first: dict[str, list[float]] = defaultdict(list)
        self._last: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))
        self._shown: set[str] = set()

    def check(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of `step`, and print symptoms that they show for the first time."""
        for symptom in SYMPTOMS:
            name = symptom.metric
            if name not in metrics or name in self._shown:
                continue
            begun, recent = self._first[name], self._last[name]
            if len(begun) < WINDOW:
                begun.append(metrics[name])
            recent.append(metrics[name])
            first, last = mean(begun), mean(recent)
            if last >= symptom.at_once or (len(recent) == WINDOW and symptom.shows(first, last)):
                self._shown.add(name)
                message = symptom.message.format(first=first, last=last)
                where = f"docs/symptoms.md#{symptom.heading}"
                print(f"step {step}: {message}; see {where}", file=sys.stderr)
