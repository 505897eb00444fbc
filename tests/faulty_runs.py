"""Runs of one tiny config on four ranks, and the result that they must reach despite any fault."""

import json
from dataclasses import dataclass
from pathlib import Path

from demo.make_sums import sums as all_sums
from engines import TestEngine
from jobs import Ended, Job, Sabotage
from runs import read_completions, read_json_lines

NUM_RANKS = 4
NUM_STEPS = 4


@dataclass(frozen=True)
class Runs:
    """Starts runs of one config, each in its own folder."""

    arguments: list[str]
    engine: TestEngine
    folder: Path

    def start(self, run_dir: Path, *arguments: str, sabotage: Sabotage | None = None) -> Job:
        return Job(
            [*self.arguments, f"train.run_dir={run_dir}", *arguments],
            NUM_RANKS,
            run_dir.parent / f"{run_dir.name}_logs",
            token=self.engine.servers.token,
            sabotage=sabotage,
        )

    def finish(self, run_dir: Path, *arguments: str) -> Ended:
        with self.start(run_dir, *arguments) as job:
            return job.end(120)


def make_runs(model: Path, engine: TestEngine, folder: Path) -> Runs:
    """Two generations of two optimizer steps each, with a checkpoint after every step."""
    data = folder / "sums.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in all_sums()))
    arguments = [
        f"model.path={model}",
        f"data.path={data}",
        f"rollout.base_urls=[{engine.servers.base_urls[0]}]",
        f"train.num_steps={NUM_STEPS}",
        "train.save_interval=1",
        "grpo.steps_per_generation=2",
        "parallel.tensor_parallel_size=2",
        "parallel.pipeline_parallel_size=2",
        "parallel.context_parallel_size=1",
    ]
    return Runs(arguments, engine, folder)


def assert_same_run(run_dir: Path, undisturbed: Path) -> None:
    """Assert bitwise equal weights, samples, rewards and losses."""
    name = "hf/model.safetensors"
    assert (run_dir / name).read_bytes() == (undisturbed / name).read_bytes(), name
    assert read_completions(run_dir) == read_completions(undisturbed)
    ours, theirs = (read_json_lines(d / "metrics.jsonl") for d in (run_dir, undisturbed))
    for key in ("step", "loss", "grad_norm", "kl", "reward", "lr"):
        assert [record[key] for record in ours] == [record[key] for record in theirs], key


def assert_resumes(runs: Runs, run_dir: Path, undisturbed: Path) -> None:
    ended = runs.finish(run_dir)
    assert ended.exit_codes == [0] * NUM_RANKS, ended.output
    assert ended.survivors == []
    assert_same_run(run_dir, undisturbed)
