"""Generations on disk, and a run that trains on those of another one instead of making its own.

With `train.save_generations` every generation is written before it is trained on. With
`train.replay` no engine is started and nothing is scored, so that the trainer alone is debugged, at
any layout, on the completions, rewards and advantages of that run.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from checkpoint_convert import ModelShape
from megatron_grpo.batch.schedule import BatchSchedule
from megatron_grpo.checkpoints.experience_file import READY, read_experience, write_experience
from megatron_grpo.config.config import Config
from megatron_grpo.data.stream import PromptStream
from megatron_grpo.launch.run_dir import write_whole
from megatron_grpo.rollout.generation import RolloutBatch, Runner, as_rollout_aborted
from megatron_grpo.rollout.services import load_stream
from megatron_grpo.timing import PhaseTimer

FACTS_FILE = "generation.json"
"""Written last: without it, a generation is not complete."""


def generation_folder(run_dir: Path, generation: int) -> Path:
    """Folder in which the run in `run_dir` writes a generation, counted from 0."""
    return run_dir / "generations" / str(generation)


def write_generation(cfg: Config, generation: int, batch: RolloutBatch, prompts: str) -> None:
    """Write a generation as engines and rewards made it, bit for bit. `prompts` is the fingerprint
    of the prompts that it was drawn from."""
    folder = generation_folder(cfg.train.run_dir, generation)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FACTS_FILE).unlink(missing_ok=True)  # of a run that is resumed before it
    try:
        write_experience(folder, batch.experience, READY)
    except SafetensorError as error:  # as which safetensors tells of a full disk
        raise OSError(f"{folder} cannot be written: {error}") from error
    facts = {"prompts": prompts, "sizes": _sizes(cfg), "metrics": batch.metrics}
    write_whole(folder / FACTS_FILE, json.dumps(facts))


def check_replay(cfg: Config) -> None:
    """Raise ValueError if the generations in `train.replay` are too few or of other sizes."""
    if (run_dir := cfg.train.replay) is None:
        return
    updates = BatchSchedule.of(cfg.grpo).updates_per_generation
    num_needed = -(-cfg.num_steps // updates)
    for number in range(num_needed):
        file = generation_folder(run_dir, number) / FACTS_FILE
        if number == 0 and not file.exists():
            raise ValueError(
                f"train.replay {run_dir} has no generations: run it with train.save_generations="
                "true first"
            )
        if not file.exists():
            raise ValueError(
                f"train.replay {run_dir} has {number} generations, and {cfg.num_steps} steps need "
                f"{num_needed}: set train.num_steps to at most {number * updates}"
            )
        if (found := json.loads(file.read_text(encoding="utf-8"))["sizes"]) != _sizes(cfg):
            raise ValueError(
                f"train.replay {run_dir} has generations of {found}, and this config has "
                f"{_sizes(cfg)}: set them as they were"
            )


def _sizes(cfg: Config) -> dict[str, int]:
    names = ("generation_batch_size", "num_generations")
    sizes = {f"grpo.{name}": getattr(cfg.grpo, name) for name in names}
    # It says which columns of routes are tokens.
    return sizes | ({"rollout.indexer_replay": True} if cfg.rollout.indexer_replay else {})


def _facts(folder: Path, stream: PromptStream) -> dict[str, Any]:
    """Read a generation's facts; raises ValueError if it was drawn from other prompts."""
    facts: dict[str, Any] = json.loads((folder / FACTS_FILE).read_text(encoding="utf-8"))
    if facts["prompts"] != (now := stream.fingerprint):
        raise ValueError(
            f"{folder} was drawn from {facts['prompts']}, but data and tokenizer now give {now}: "
            "set data.* and model.path as they were"
        )
    return facts


class Replay(Runner):
    """Reads the generations of the run in `train.replay`, each when it is needed. Raises ValueError
    if they were drawn from other prompts."""

    def __init__(self, cfg: Config, shape: ModelShape, is_preempted: Callable[[], bool]) -> None:
        # Imports transformers, which the other ranks make no use of.
        from checkpoint_convert.tokenizer import load_tokenizer  # noqa: PLC0415

        assert cfg.train.replay is not None, "there is a run to replay"
        self._run_dir, self._is_preempted = cfg.train.replay, is_preempted
        self.tokenizer = load_tokenizer(cfg.model.path)
        self.stream = load_stream(cfg, shape, self.tokenizer)
        _facts(generation_folder(self._run_dir, 0), self.stream)  # before a model is loaded

    def finish(self, generation: int, timer: PhaseTimer) -> RolloutBatch:
        """Read a generation."""
        folder = generation_folder(self._run_dir, generation)
        what = f"reading generation {generation}"
        with as_rollout_aborted(what, self._is_preempted), timer.phase("load"):
            facts = _facts(folder, self.stream)
            experience = read_experience(folder, self.stream.prompts, READY)
        assert experience is not None, "the preflight has found it"
        # Its seconds are no part of this run's steps.
        metrics = {k: v for k, v in facts["metrics"].items() if not k.startswith("time/")}
        return RolloutBatch(experience, metrics)
