"""Over-sampling with engines and rewards that fail."""

import json
import math
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from checkpoint_convert import read_shape
from demo.make_sums import sums
from helpers.engines import wait_until
from helpers.models import tiny_model
from helpers.policies import tiny_config
from helpers.scripted_engines import ScriptedClient, ScriptedEngine
from megatron_grpo.checkpoints.trainer_state import TrainerState
from megatron_grpo.engines import RolloutAborted
from megatron_grpo.engines.in_flight import InFlight
from megatron_grpo.launch.run_dir import new_token
from megatron_grpo.rewards import RewardError
from megatron_grpo.rollout.dynamic_sampling import ScoredGroup
from megatron_grpo.rollout.generate import Rollouter
from megatron_grpo.rollout.group_runner import GroupRunner
from megatron_grpo.timing import PhaseTimer
from parallel import ParallelDims

TIMER = PhaseTimer(lambda phase: None)
NUM_WANTED = 6
"""Groups at the engines; a generation has 4."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


class Scores:
    """Scores by the first token; it can fail."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.value = 1.0
        self.num_scored = 0

    def __call__(self, samples) -> list[ScoredGroup]:
        if self.error:
            raise self.error
        self.num_scored += len(samples)
        values = [self.value * sample.sample_index for sample in samples]
        return [ScoredGroup(samples, [{"exact": value} for value in values], values)]


@pytest.fixture
def rollouter(tmp_path: Path, model: Path) -> Iterator[Rollouter]:
    """Its engines are scripted, and hold their requests; its rewards are `Scores`."""
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in sums()))
    cfg = tiny_config(
        model,
        ParallelDims(),
        f"data.path={data}",
        f"train.run_dir={tmp_path / 'run'}",
        "train.num_steps=20",
        "rollout.base_urls=[http://127.0.0.1:9]",  # nobody is asked there
        "rollout.in_flight_updates=true",
        "grpo.old_logprobs=rollout",
        "rollout.max_staleness=2",
        "rollout.max_completion_length=8",
        f"rollout.over_sampling={NUM_WANTED / 4}",
    )
    with closing(Rollouter(cfg, read_shape(model), new_token(), num_ranks=1)) as rollouter:
        rollouter.score = Scores()
        use(rollouter, ScriptedEngine(version=0))
        yield rollouter


def use(rollouter: Rollouter, engine: ScriptedEngine) -> None:
    """Give it an engine of that script, and an `InFlight` of its own."""
    rollouter.in_flight.end()
    rollouter.in_flight.close()
    rollouter.engines, rollouter.engine = ScriptedClient(only=engine), engine
    rollouter.in_flight = InFlight(rollouter.engines, lambda tokens: "")


def runner_of(rollouter: Rollouter, state: TrainerState) -> GroupRunner:
    timeline = SimpleNamespace(add=lambda *args, **kwargs: None, num_rollouts=1)
    return GroupRunner(rollouter, SimpleNamespace(is_preempted=False), timeline, state)


@pytest.fixture
def runner(rollouter: Rollouter) -> Iterator[GroupRunner]:
    with closing(runner_of(rollouter, TrainerState(step=0))) as runner:
        runner.resume(0)
        yield runner


def wait_for_requests(rollouter: Rollouter, count: int) -> None:
    assert wait_until(lambda: len(rollouter.engine.asked) >= count, seconds=10)


@pytest.mark.parametrize("error", [RewardError("by fire"), KeyError("by fire")])
def test_a_failure_is_told_though_weights_were_pushed_since(runner, rollouter, error):
    rollouter.score.error = error
    rollouter.engine.answers.set()
    assert wait_until(lambda: runner._failure, seconds=10)
    runner.suspend()
    runner.resume(0)
    with pytest.raises(RolloutAborted if isinstance(error, RewardError) else KeyError):
        runner.finish(0, TIMER)


def test_groups_with_too_few_scores_stay_in_the_checkpoint_with_which_the_run_ends(
    runner, rollouter
):
    rollouter.score.value = math.nan
    rollouter.engine.answers.set()
    with pytest.raises(RolloutAborted, match="have no score"):
        runner.finish(0, TIMER)
    assert runner.open_groups().untaken == (*range(NUM_WANTED),)
