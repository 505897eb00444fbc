"""A generation whose engines are lost: which parts are kept and which are dropped."""

import asyncio
import json
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from checkpoint_convert import read_shape
from demo.make_sums import sums
from helpers.models import tiny_model
from helpers.policies import tiny_config
from megatron_grpo.data.samples import Sample
from megatron_grpo.engines.choice import Choice, Logprobs, Token
from megatron_grpo.engines.generation import CompletionRequests
from megatron_grpo.engines.http import NoServingEngine
from megatron_grpo.launch.run_dir import new_token
from megatron_grpo.rollout.generate import RolloutRequest
from megatron_grpo.rollout.rollouter import Rollouter
from megatron_grpo.rollout.runner import RolloutRunner
from megatron_grpo.timing import PhaseTimer
from parallel import ParallelDims

GENERATION = 3


class Engines:
    """Stands for a pool: each answers one request, and the first `num_lost` are lost by then."""

    def __init__(self, num_lost: int) -> None:
        self.num_lost, self.asked = num_lost, []

    def generate(self, generation: CompletionRequests) -> list[Sample]:
        self.asked.append((generation, len(generation.open)))
        url = f"http://engine-{len(self.asked)}"
        for number in [*generation.open]:
            asyncio.run(generation.take_answer(number, choice(number), url))
            if len(self.asked) <= self.num_lost:
                raise NoServingEngine("no rollout engine serves")
        return generation.samples()


def choice(number: int) -> Choice:
    return Choice(
        token_ids=[20 + number],
        logprobs=Logprobs([Token(-1.0)]),
        finish_reason="stop",
        text=str(number),
        weight_versions=[],
    )


def rollouter_of(tmp_path: Path, rows: list, *overrides: str) -> Rollouter:
    data, model = tmp_path / "sums.jsonl", tiny_model(tmp_path / "model", "qwen3")
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = tiny_config(
        model,
        ParallelDims(),
        f"data.path={data}",
        f"train.run_dir={tmp_path / 'run'}",
        "rollout.base_urls=[http://127.0.0.1:9]",  # nobody is asked there
        *overrides,
    )
    return Rollouter(cfg, read_shape(model), new_token(), num_ranks=1)


@pytest.fixture
def rollouter(tmp_path: Path):
    with closing(rollouter_of(tmp_path, sums())) as rollouter:
        yield rollouter


def test_rows_without_an_answer_that_the_reward_can_read_are_left_out(tmp_path: Path):
    rows = [{"prompt": str(i), "answer": "####" if i == 1 else "1"} for i in range(6)]
    overrides = "reward.functions=[math_answer]", "data.on_invalid=skip"
    with closing(rollouter_of(tmp_path, rows, *overrides)) as rollouter:
        assert [prompt.index for prompt in rollouter.stream.prompts] == [0, 2, 3, 4, 5]


def test_a_rollout_continues_with_the_same_weights_and_begins_anew_with_others(rollouter):
    engines = rollouter.engines = Engines(num_lost=3)
    runner = RolloutRunner(rollouter, SimpleNamespace(is_preempted=False), None)
    timer = PhaseTimer(lambda phase: None)
    for version in (1, 1, 2):
        runner.begin(RolloutRequest(GENERATION, version))
        with pytest.raises(NoServingEngine):
            runner.finish(GENERATION, timer)
    runner.begin(RolloutRequest(GENERATION, 2))
    batch = runner.finish(GENERATION, timer)
    asked = [generation for generation, _ in engines.asked]
    assert asked[0] is asked[1] is not asked[2] is asked[3]
    assert [num_open for _, num_open in engines.asked] == [16, 15, 16, 15]
    samples = batch.experience.samples
    assert [sample.policy_version for sample in samples] == [2] * 16
    assert [s.prompt for s in samples[::4]] == rollouter.stream.batch(GENERATION)
    assert batch.metrics["rollout/num_engines"] == 2
