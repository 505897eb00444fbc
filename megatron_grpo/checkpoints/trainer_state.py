"""The run's progress and random states, which a checkpoint holds besides Megatron's state."""

import json
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from checkpoint_convert.formats import errors_named
from megatron_grpo.checkpoints.folders import STATE_FILE
from parallel import ParallelDims

RANDOM_FILE = "random_states.safetensors"


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A generation that has been sampled but not yet trained on."""

    generation: int
    metrics: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class OpenGroups:
    """Groups that no generation has taken, by the number of their prompt in the stream."""

    next_number: int
    """First number that was not requested yet."""
    untaken: tuple[int, ...]
    """Lower numbers that no generation has taken; they are requested again."""
    asked_at: tuple[tuple[int, int], ...] = ()
    """(number, generation that requested it) of groups with samples in the checkpoint, whose
    `group_ids` are these numbers."""
    engines: tuple[tuple[int, tuple[str, ...]], ...] = ()
    """(number, addresses of the engines that answered) of groups with samples in the checkpoint."""


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """The progress of a run after `step` optimizer steps."""

    step: int
    num_skipped_in_a_row: int = 0
    """Consecutive skipped steps, up to this one."""
    wandb_id: str | None = None
    prompts: str | None = None
    """Fingerprint of the prompts that generations are drawn from."""
    beta: float | None = None
    """Weight of the KL penalty in the next step."""
    base: int | None = None
    """Checksum of the frozen weights below the adapters; None without adapters."""
    ready: tuple[Ready, ...] = ()
    """Generations that training has not begun, in order."""
    groups: OpenGroups | None = None
    """Groups in the queue of `rollout.over_sampling`; with `rollout.in_flight_updates` alone, the
    groups of generations in progress."""
    stopped_by: dict[str, Any] | None = None
    """The hook that ended the run here, as the config names it."""

    def check_base(self, now: int | None) -> None:
        """Raise ValueError if the frozen weights differ from those that the adapters were trained
        on."""
        if self.step and self.base != now:
            raise ValueError(
                f"the checkpoint of step {self.step} has adapters of other weights than those in "
                "model.path: put back the files, or choose another train.run_dir"
            )

    def check_prompts(self, now: str) -> None:
        """Raise ValueError if the run was saved with other prompts than the current ones."""
        if self.prompts not in (None, now):
            raise ValueError(
                f"the checkpoint of step {self.step} was made with {self.prompts}, but data.path "
                f"and the tokenizer now give {now}: put back the file and the tokenizer, or choose "
                "another train.run_dir; a run without data.date in its config.yaml, whose chat "
                "template writes the date, needs data.date=YYYY-MM-DD, the day of that checkpoint"
            )


@dataclass(frozen=True, kw_only=True)
class Record:
    """Contents of `trainer.json`."""

    state: TrainerState
    layout: ParallelDims
    counters: dict[str, Any]
    """Counters of the optimizer and its schedule, equal on all ranks."""
    cursor: dict[str, int]
    """Position of the next step in the data. Follows from the step; saved for human readers."""


def write_record(folder: Path, record: Record) -> None:
    versions = {name: version(name) for name in ("megatron-core", "torch")}
    text = json.dumps({**asdict(record), "versions": versions}, indent=1)
    (folder / STATE_FILE).write_text(text + "\n", encoding="utf-8")


def read_record(folder: Path, step: int) -> Record:
    """Read `trainer.json` of the checkpoint of `step`; ValueError if damaged."""
    path = folder / STATE_FILE
    try:
        with errors_named(path):
            found = json.loads(path.read_text(encoding="utf-8"))
        found.pop("versions")
        saved, layout = found.pop("state"), ParallelDims(**found.pop("layout"))
        ready = saved.pop("ready") or []  # a single object, or null, in older checkpoints
        each = [ready] if isinstance(ready, dict) else ready
        if groups := saved.pop("groups", None):
            groups = OpenGroups(
                next_number=groups["next_number"],
                untaken=tuple(groups["untaken"]),
                asked_at=tuple((number, then) for number, then in groups.get("asked_at", ())),
                engines=tuple((number, tuple(urls)) for number, urls in groups.get("engines", ())),
            )
        state = TrainerState(**saved, ready=tuple(Ready(**one) for one in each), groups=groups)
        record = Record(state=state, layout=layout, **found)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"its {STATE_FILE} is damaged: {error!r}") from None
    if record.state.step != step:
        raise ValueError(f"its {STATE_FILE} is of step {record.state.step}")
    return record


def write_random_states(folder: Path, rows: Tensor) -> None:
    """Write the random states of all ranks, bytes [ranks, n]."""
    save_file({"bytes": rows}, folder / RANDOM_FILE)


def read_random_state(folder: Path, rank: int) -> Tensor:
    """Read the random state of a rank, bytes [n]."""
    with safe_open(folder / RANDOM_FILE, "pt") as file:
        row: Tensor = file.get_slice("bytes")[rank]
    return row
