import gzip
import json
from pathlib import Path

import torch

from helpers.ranks import run_ranks
from megatron_grpo.config.train import TrainConfig
from megatron_grpo.reporting.profiler import profiled_step
from megatron_grpo.timing import PhaseTimer


def two_steps(rank: int, train: TrainConfig) -> list[str]:
    phases: list[str] = []
    for step in (1, 2):
        timer = PhaseTimer(phases.append)
        with profiled_step(train, step, timer), timer.phase("train"):
            torch.ones(8, 8) @ torch.ones(8, 8)
    return [phase for phase in phases if phase]


def test_a_step_is_profiled_on_the_ranks_asked_for_and_files_may_take_their_time(
    tmp_path: Path,
) -> None:
    train = TrainConfig(run_dir=tmp_path, num_steps=2, profile_steps=[2], profile_ranks=[1])
    assert run_ranks(2, two_steps, train) == [["train", "train", "save"]] * 2
    [path] = (tmp_path / "profile").iterdir()
    assert path.name == "step_2_rank_1.json.gz"
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert "aten::mm" in {event.get("name") for event in events}
