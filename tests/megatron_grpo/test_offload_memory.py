"""What the processes of a whole run hold in each phase, beside the plan."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from checkpoint_convert import read_shape
from demo.make_sums import sums
from helpers.engines import TestEngine, running_engine
from helpers.jobs import Job
from helpers.memory import WIDE, held
from helpers.models import tiny_model
from megatron_grpo import train
from megatron_grpo.config.file import load_config
from megatron_grpo.config.offload import Phase, parts_away, parts_copied
from megatron_grpo.planning.state import part_bytes, state_bytes
from megatron_grpo.policy.residency import Residency

NUM_RANKS = 2
PHASES: tuple[Phase, ...] = ("log-probabilities", "train", "push", "generate")


@dataclass(frozen=True)
class TellMemory:
    """Makes each rank write, for each phase, what it holds more than before it had a model.

    When the phase begins; training when it ends, as gradients have no memory before it fills them.
    """

    folder: Path

    def __call__(self, rank: int) -> None:
        policy_of, enter = train.policy_of, Residency.enter
        empty, last = 0, ""

        def tell(phase: str) -> None:
            with (self.folder / f"rank_{rank}").open("a") as file:
                file.write(json.dumps([phase, held() - empty]) + "\n")

        def build(*arguments: Any) -> Any:
            nonlocal empty
            empty = held()
            return policy_of(*arguments)

        def move(residency: Residency, phase: Phase) -> None:
            nonlocal last
            if last == "train":
                tell(last)
            enter(residency, phase)
            if phase != "train":
                tell(phase)
            last = phase

        train.policy_of, Residency.enter = build, move


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestEngine]:
    folder = tmp_path_factory.mktemp("wide")
    tiny_model(folder / "model", "qwen3", tied=True, **WIDE)
    with running_engine("vllm", folder / "model", folder / "logs") as engine:
        yield engine


@pytest.mark.slow
@pytest.mark.parametrize(
    "offload", ["none", "optimizer", "all", "[gradients]", "[weights]", "[reference]"]
)
def test_processes_hold_in_each_phase_what_the_plan_says(
    engine: TestEngine, tmp_path: Path, offload: str
) -> None:
    data, run = tmp_path / "sums.jsonl", tmp_path / "run"
    data.write_text("".join(json.dumps(row) + "\n" for row in sums()))
    arguments = [
        f"model.path={engine.folder}",
        f"data.path={data}",
        f"train.run_dir={run}",
        "train.num_steps=3",
        "train.save_interval=3",
        f"train.offload={offload}",
        "rollout.enable_sleep_mode=true",
        f"rollout.base_urls=[{engine.servers.base_urls[0]}]",
        "rollout.update_weights_bucket_megabytes=8",
        *(f"parallel.{name}_parallel_size=1" for name in ("tensor", "pipeline", "context")),
        f"parallel.data_parallel_size={NUM_RANKS}",
    ]
    token, told = engine.servers.token, TellMemory(tmp_path)
    with Job(arguments, NUM_RANKS, tmp_path / "logs", token=token, sabotage=told) as job:
        ended = job.end(200)
    assert ended.exit_codes == [0] * NUM_RANKS, ended.output
    cfg = load_config(run / "config.yaml")
    for rank in range(NUM_RANKS):
        state = state_bytes(cfg, read_shape(engine.folder), rank)
        on_host = part_bytes(state, parts_copied(cfg.offload))
        rows = [json.loads(row) for row in (tmp_path / f"rank_{rank}").read_text().splitlines()]
        trained = [phase for phase, _ in rows].index("train")
        assert {phase for phase, _ in rows[trained:]} == {*PHASES}
        for phase, found in rows[trained:]:
            planned = state.total - part_bytes(state, parts_away(cfg.offload, phase)) + on_host
            if phase == "log-probabilities" and "gradients" in parts_away(cfg.offload, "generate"):
                planned -= state.gradients  # they are back, and have no pages yet
            assert found == pytest.approx(planned, rel=0.05), (rank, phase)
