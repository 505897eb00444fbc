"""Whole runs with pushes while completions are in progress, and checks of their results."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

from safetensors.torch import load_file

from helpers.engines.live import TestEngine
from helpers.runs.jobs import Runs, write_sums
from helpers.runs.train import read_json_lines, read_metrics
from megatron_grpo.checkpoints.experience_file import OPEN, READY, SAMPLES_FILE, TOKENS_FILE
from megatron_grpo.checkpoints.folders import latest_step, step_folder
from megatron_grpo.checkpoints.trainer_state import OpenGroups, read_record
from megatron_grpo.config.agent import AGENT
from megatron_grpo.config.reward import ENVIRONMENT
from megatron_grpo.engines.choice import CUT
from megatron_grpo.rollout.replay import generation_folder

NUM_STEPS, MAX_STALENESS, BATCH_SIZE, NUM_GENERATIONS = 10, 3, 16, 4

Key = tuple[int, int]
"""(data row, sample index); unique as long as a run has fewer prompts than rows."""


def make_in_flight_runs(model: Path, engine: TestEngine, folder: Path) -> Runs:
    """Runs on one rank; later arguments override these."""
    arguments = [
        f"model.path={model}",
        f"data.path={write_sums(folder)}",
        "rollout.in_flight_updates=true",
        f"rollout.max_staleness={MAX_STALENESS}",
        "rollout.max_completion_length=200",
        f"grpo.generation_batch_size={BATCH_SIZE}",
        f"grpo.num_generations={NUM_GENERATIONS}",
        "grpo.rollout_importance_sampling_mode=token_truncate",
        f"train.num_steps={NUM_STEPS}",
        "train.save_interval=2",
    ]
    return Runs(arguments, engine, folder)


def spans_of(row: dict) -> list[tuple[int, int]]:
    """(weight version, number of tokens) of each part of a logged completion."""
    return row.get("versions") or [(row["policy_version"], row["num_tokens"])]


def check_run(
    run_dir: Path, num_steps: int = NUM_STEPS, max_staleness: int = MAX_STALENESS
) -> None:
    """Assert that no token is too stale, and that every step has trained once on a generation of
    its own."""
    rows = read_json_lines(run_dir / "completions.jsonl")
    each = Counter((row["step"], row["prompt_index"], row["sample_index"]) for row in rows)
    assert set(each.values()) == {1} and len(each) == num_steps * BATCH_SIZE
    for row in rows:
        versions = [version for version, _ in spans_of(row)]
        assert versions == sorted(set(versions))
        assert 0 <= row["step"] - 1 - versions[0] <= max_staleness
        length = sum(count for _, count in spans_of(row))
        # Parts of a dialogue have its observations, too.
        has_partner = {AGENT, ENVIRONMENT} & row["rewards"].keys()
        assert length >= row["num_tokens"] if has_partner else length == row["num_tokens"]


def newest_groups(run_dir: Path) -> OpenGroups:
    """The open groups in the newest checkpoint."""
    newest = newest_folder(run_dir)
    groups = read_record(newest, int(newest.name[5:])).state.groups
    assert groups is not None
    return groups


def has_checkpoint(run_dir: Path) -> bool:
    return bool(latest_step(run_dir / "checkpoints"))


def newest_folder(run_dir: Path) -> Path:
    checkpoints = run_dir / "checkpoints"
    return step_folder(checkpoints, latest_step(checkpoints))


@dataclass(frozen=True)
class Part:
    """A sample in a checkpoint, whole or partial."""

    token_ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    is_whole: bool

    def is_in(self, whole: "Part") -> bool:
        """Whether `whole` continues this sample, or equals it if it is complete."""
        ids, count = self.token_ids, len(self.token_ids)
        begins = (
            whole.token_ids[:count] == ids
            and whole.spans[: len(self.spans) - 1] == (self.spans[:-1])
        )
        return begins and (not self.is_whole or whole.token_ids == ids)


def parts_in(folder: Path, prefix: str) -> dict[Key, Part]:
    """Samples in the files of `prefix`; asserts that none occurs twice."""
    file = folder / f"{prefix}{SAMPLES_FILE}"
    if not file.exists():
        return {}
    rows, tensors = read_json_lines(file), load_file(folder / f"{prefix}{TOKENS_FILE}")
    bounds = pairwise([0, *accumulate(tensors["lengths"].tolist())])
    ids = tensors["completion_ids"].tolist()
    found = {}
    for row, (start, end) in zip(rows, bounds, strict=True):
        spans = row["versions"] or [(row["policy_version"], end - start)]
        part = Part(tuple(ids[start:end]), tuple(map(tuple, spans)), row["finish_reason"] != CUT)
        assert found.setdefault((row["prompt"], row["sample_index"]), part) is part
    return found


def saved_parts(run_dir: Path) -> dict[Key, Part]:
    """Untrained samples of the newest checkpoint; asserts that none occurs twice."""
    folder = newest_folder(run_dir)
    found = parts_in(folder, OPEN)
    for file in folder.glob(f"{READY}*{SAMPLES_FILE}"):
        ready = parts_in(folder, file.name.removesuffix(SAMPLES_FILE))
        assert not found.keys() & ready.keys()
        found |= ready
    return found


def check_nothing_lost(run_dir: Path, saved: list[Mapping[Key, Part]], num_steps: int) -> None:
    """Assert that every sample in `saved`, the parts of earlier checkpoints, was trained on once or
    is in the newest checkpoint. The run has `train.save_generations`."""
    made: dict[Key, Part] = {}
    for generation in range(num_steps):
        parts = parts_in(generation_folder(run_dir, generation), READY)
        assert len(parts) == BATCH_SIZE and not made.keys() & parts.keys()
        made |= parts
    left = saved_parts(run_dir)
    assert not made.keys() & left.keys()
    for parts in saved:
        lost = [key for key, part in parts.items() if not part.is_in((made | left)[key])]
        assert not lost, lost
    assert not sum(record.get("rollout/dropped_stale", 0) for record in read_metrics(run_dir))
