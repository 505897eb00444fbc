"""What a run shows and leaves behind, step by step. Rank 0 only."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_grpo.batching import BatchSchedule
from megatron_grpo.config import Config
from megatron_grpo.config_file import dump_config
from megatron_grpo.experience import Experience
from megatron_grpo.metrics import completion_metrics, dialogue_metrics, reward_metrics
from megatron_grpo.progress import ProgressBar
from megatron_grpo.report import CURVES_FILE, draw_curves
from megatron_grpo.timing import PhaseTimer
from megatron_grpo.tracking import METRICS_FILE, Tracking, completion_rows


class RunLog:
    """Config, metrics, completions and curves in the run directory, and the progress bar."""

    def __init__(self, cfg: Config, first_step: int) -> None:
        self.run_dir = cfg.train.run_dir
        self.steps_per_generation = BatchSchedule.of(cfg.grpo).steps_per_generation
        self.has_environment = cfg.environment.name is not None
        self.run_dir.mkdir(parents=True, exist_ok=True)
        (self.run_dir / "config.yaml").write_text(dump_config(cfg))
        self.tracking = Tracking(
            self.run_dir, first_step, cfg.wandb, config=cfg.model_dump(mode="json")
        )
        self.bar = ProgressBar(first_step, cfg.train.num_steps)

    def step(
        self,
        step: int,
        train_metrics: dict[str, float],
        experience: Experience,
        timer: PhaseTimer,
        *,
        is_new: bool,
    ) -> None:
        """Log optimizer step `step`, counted from 1; completions only of a new experience."""
        samples = experience.samples
        times = timer.metrics()
        metrics = {
            **train_metrics,
            **reward_metrics(
                experience.rewards, experience.totals, experience.group_ids, experience.advantages
            ),
            **completion_metrics(
                [sample.num_sampled for sample in samples],
                [sample.finish_reason == "length" for sample in samples],
            ),
            "tokens_per_second": (
                experience.num_tokens / self.steps_per_generation / times["time/step"]
            ),
            **times,
        }
        if self.has_environment:
            metrics |= dialogue_metrics(
                [len(sample.step_rewards) for sample in samples],
                [sample.finish_reason for sample in samples],
            )
        rows = completion_rows(step, samples, experience.rewards, experience.advantages.tolist())
        self.tracking.log(step, metrics, rows if is_new else [])
        self.bar.show(step, metrics)

    def close(self) -> None:
        """Finish the records and draw the curves.

        What fails in that is told, and ends nothing: every step is on disk, and the run may be on
        its way out for a reason that decides about its exit code.
        """
        self.bar.close()
        with told("the records of the run could not be finished"):
            self.tracking.close()
        with told(f"{CURVES_FILE} could not be drawn"):
            if (self.run_dir / METRICS_FILE).stat().st_size:
                draw_curves(self.run_dir)


@contextmanager
def told(what: str) -> Iterator[None]:
    """Print `what` and the error of the block, if it raises one."""
    try:
        yield
    except Exception as error:
        print(f"{what}: {error!r}", file=sys.stderr)
