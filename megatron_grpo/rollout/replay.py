"""Generations on disk, and a run that replays another run's generations.

With `train.save_generations` every generation is written before training on it. With `train.replay`
no engine is started and nothing is scored: the trainer alone can be debugged, at any layout, on the
completions, rewards and advantages of the other run.
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
from parallel.words import counted

FACTS_FILE = "generation.json"
"""File written last: a generation without it is incomplete."""


def generation_folder(run_dir: Path, generation: int) -> Path:
    """Folder of a generation (counted from 0) of the run in `run_dir`."""
    return run_dir / "generations" / str(generation)


def write_generation(cfg: Config, generation: int, batch: RolloutBatch, prompts: str) -> None:
    """Write a generation as engines and rewards made it, bit for bit. `prompts` is the fingerprint
    of the prompt stream."""
    folder = generation_folder(cfg.train.run_dir, generation)
    folder.mkdir(parents=True, exist_ok=True)
    # A resumed run may write the generation again: until it is whole, it must not look complete.
    (folder / FACTS_FILE).unlink(missing_ok=True)
    try:
        write_experience(folder, batch.experience, READY)
    except SafetensorError as error:  # safetensors' error for a full disk
        raise OSError(f"{folder} cannot be written: {error}") from error
    facts = {"prompts": prompts, "sizes": _sizes(cfg), "metrics": batch.metrics}
    write_whole(folder / FACTS_FILE, json.dumps(facts))


def check_replay(cfg: Config) -> None:
    """Raise ValueError if `train.replay` has too few generations, or generations of other sizes."""
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
                f"train.replay {run_dir} has {counted(number, 'generation')}, and {cfg.num_steps} "
                f"steps need {num_needed}: set train.num_steps to at most {number * updates}"
            )
        if (found := json.loads(file.read_text(encoding="utf-8"))["sizes"]) != _sizes(cfg):
            raise ValueError(
                f"train.replay {run_dir} has generations of {found}, and this config has "
                f"{_sizes(cfg)}: set them as they were"
            )


def _sizes(cfg: Config) -> dict[str, int]:
    names = ("generation_batch_size", "num_generations")
    sizes = {f"grpo.{name}": getattr(cfg.grpo, name) for name in names}
    # indexer_replay adds columns to `Sample.routes`: the positions that indexers chose.
    return sizes | ({"rollout.indexer_replay": True} if cfg.rollout.indexer_replay else {})


def _facts(folder: Path, stream: PromptStream) -> dict[str, Any]:
    """Read a generation's `FACTS_FILE`; raises ValueError if its prompts are not `stream`'s."""
    facts: dict[str, Any] = json.loads((folder / FACTS_FILE).read_text(encoding="utf-8"))
    if facts["prompts"] != (now := stream.fingerprint):
        raise ValueError(
            f"{folder} was drawn from {facts['prompts']}, but data and tokenizer now give {now}: "
            "set data.* and model.path as they were"
        )
    return facts


class Replay(Runner):
    """Reads the generations of the run in `train.replay`, each when it is needed. Raises ValueError
    if this run's data has other prompts."""

    def __init__(self, cfg: Config, shape: ModelShape, is_preempted: Callable[[], bool]) -> None:
        # Imported here: it imports transformers, which only rank 0 needs.
        from checkpoint_convert.tokenizer import load_tokenizer  # noqa: PLC0415

        assert cfg.train.replay is not None, "there is a run to replay"
        self._run_dir, self._is_preempted = cfg.train.replay, is_preempted
        self.tokenizer = load_tokenizer(cfg.model.path)
        self.stream = load_stream(cfg, shape, self.tokenizer)
        # Other prompts fail here, before the minutes of loading a model.
        _facts(generation_folder(self._run_dir, 0), self.stream)

    def finish(self, generation: int, timer: PhaseTimer) -> RolloutBatch:
        folder = generation_folder(self._run_dir, generation)
        what = f"reading generation {generation}"
        with as_rollout_aborted(what, self._is_preempted), timer.phase("load"):
            facts = _facts(folder, self.stream)
            experience = read_experience(folder, self.stream.prompts, READY)
        assert experience is not None, "the preflight has found it"
        # Without the other run's seconds, which would be logged as phases of this run's steps.
        metrics = {k: v for k, v in facts["metrics"].items() if not k.startswith("time/")}
        return RolloutBatch(experience, metrics)
