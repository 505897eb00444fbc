"""Whole runs whose completions are dialogues, with a real vLLM engine."""

from pathlib import Path

import pytest

from helpers.models.tiny import talkative
from helpers.runs.jobs import Ended, Job
from helpers.runs.train import read_json_lines, read_metrics
from megatron_grpo.checkpoints.folders import latest_step

pytestmark = pytest.mark.engines

NUMBERS = """
import os, random, re, signal

class Digits:
    '''Wants digits, and says how many it has seen.

    One row may make it fail; once a step is logged, the first to be reset ends all.'''
    def __init__(self, num_turns, fails_at=None, log="/dev/null"):
        self.num_turns, self.fails_at, self.log = num_turns, fails_at, log
    def reset(self, prompt, answer):
        self.turn = 0
        if os.path.getsize(self.log): os.kill(os.getppid(), signal.SIGKILL)
        if answer == self.fails_at: raise RuntimeError("out of order")
    def step(self, text):
        self.turn += 1
        seen = sum(character.isdigit() for character in text)
        return f"{seen} digits", seen / max(1, len(text)), self.turn == self.num_turns
"""


@pytest.fixture(scope="module")
def model(tied_model: Path, tmp_path_factory) -> Path:
    return talkative(tmp_path_factory.mktemp("talkative") / "model", tied_model)


@pytest.fixture
def arguments(model: Path, tmp_path: Path) -> list[str]:
    data, file = tmp_path / "data.jsonl", tmp_path / "digits.py"
    data.write_text("".join(f'{{"prompt": "{i} + 1", "answer": "{i + 1}"}}\n' for i in range(8)))
    file.write_text(NUMBERS)
    return [
        f"model.path={model}",
        f"data.path={data}",
        f"environment.name={file}:Digits",
        "environment.arguments={num_turns: 4}",
        "environment.max_turns=3",
        "rollout.max_completion_length=200",
        "reward.functions=[]",
        f"train.run_dir={tmp_path / 'run'}",
    ]


def finish(engine, folder: Path, num_ranks: int, *arguments: str) -> Ended:
    """A run on forked data-parallel ranks with a running engine."""
    layout = [f"parallel.{axis}_parallel_size=1" for axis in ("tensor", "pipeline", "context")]
    url = f"rollout.base_urls=[{engine.servers.base_urls[0]}]"
    data = f"parallel.data_parallel_size={num_ranks}"
    job = Job(
        [*arguments, *layout, data, url], num_ranks, folder / "logs", token=engine.servers.token
    )
    with job:
        return job.end(150)


@pytest.mark.long
def test_a_run_with_an_environment_trains_resumes_and_shows_its_dialogues(
    live_engine, arguments, tmp_path
):
    evaluated = ["eval.data={}", "eval.max_prompts=3", "eval.num_generations=2"]
    for num_steps in (1, 2):
        steps = f"train.num_steps={num_steps}"
        ended = finish(live_engine, tmp_path, 2, *arguments, *evaluated, steps)
        assert ended.exit_codes == [0, 0], ended.output
        assert ended.survivors == []
    before, *records = read_metrics(tmp_path / "run")
    assert [record["step"] for record in records] == [1, 2]
    for record in (before, *records):
        assert record["eval/num_prompts"] == 3
        assert 1 < record["eval/num_turns/mean"] <= 3
        assert record["eval/mean@2"] == record["eval/reward/environment/mean"]
    rows = read_json_lines(tmp_path / "run" / "completions.jsonl")
    assert len(rows) == 32
    for record, of_step in zip(records, (rows[:16], rows[16:]), strict=True):
        assert record["grad_norm"] > 0
        assert 1 < record["num_turns/mean"] <= record["num_turns/max"] <= 3
        share = sum(row["finish_reason"] == "max_turns" for row in of_step) / 16
        assert record["num_turns/clipped_ratio"] == share
        assert record["environment/failed_ratio"] == 0
        assert record["reward"] == pytest.approx(
            sum(row["rewards"]["environment"] for row in of_step) / 16
        )
        assert record["reward/environment/mean"] == record["reward"]
        # The engine's log-probabilities are of the very tokens that are trained on.
        assert record["rollout/logprob_gap_max"] < 1e-4
    dialogue = next(row for row in rows if row["finish_reason"] == "max_turns")["completion"]
    assert dialogue.count(" digits<eos>\n<start>assistant\n") == 2


@pytest.mark.slow
def test_a_generation_of_dialogues_that_a_run_ended_inside_is_made_anew(
    live_engine, arguments, tmp_path
):
    several = [
        "grpo.steps_per_generation=2",
        "grpo.supervision=process",  # of the turns, and of the function at the end
        "reward.functions=[demo/rewards.py:share_of_digits]",
    ]
    whole = [a for a in arguments if not a.startswith("train.run_dir")]
    ended = finish(
        live_engine, tmp_path, 1, *whole, *several, f"train.run_dir={tmp_path / 'whole'}"
    )
    assert ended.exit_codes == [0], ended.output
    for num_steps in (1, 2):
        ended = finish(
            live_engine, tmp_path, 1, *arguments, *several, f"train.num_steps={num_steps}"
        )
        assert ended.exit_codes == [0], ended.output
    assert len(read_json_lines(tmp_path / "run" / "completions.jsonl")) == 16
    [_, resumed] = read_metrics(tmp_path / "run")
    assert resumed["reward/environment/mean"] > 0 and resumed["reward/share_of_digits/mean"] > 0
    assert resumed["num_turns/mean"] > 1 and resumed["rollout/logprob_gap_max"] < 1e-4


@pytest.mark.long
def test_samples_whose_environment_fails_are_masked_up_to_a_limit(live_engine, arguments, tmp_path):
    """They fail before their first turn, so that there is not a token of them."""
    fails = [
        "environment.arguments={num_turns: 4, fails_at: '3'}",
        "grpo.steps_per_generation=2",
        "grpo.supervision=process",
    ]
    outputs = ""
    for num_steps in (1, 3, 4):  # twice the run ends inside of a generation
        steps = [f"train.num_steps={num_steps}", "reward.max_failed_fraction=0.5"]
        ended = finish(live_engine, tmp_path, 1, *arguments, *fails, *steps)
        assert ended.exit_codes == [0], ended.output
        outputs += ended.output
    # Each of the eight prompts comes once in two generations, with four samples of sixteen.
    records = read_metrics(tmp_path / "run")
    assert sorted(record["environment/failed_ratio"] for record in records) == [0, 0, 0.25, 0.25]
    assert all(record["grad_norm"] > 0 for record in records)
    assert "the environment failed in 4 samples, the first of them: prompt 2," in outputs
    assert "RuntimeError: out of order" in outputs
    limit = ["train.num_steps=4", "reward.max_failed_fraction=0.1"]
    other = f"train.run_dir={tmp_path / 'other'}"
    ended = finish(live_engine, tmp_path, 1, *arguments, *fails, *limit, other)
    assert ended.exit_codes == [1]
    assert "the environment failed in 4 samples, the first of them: prompt 2," in ended.output
    assert "4 of 16 completions have no score so far" in ended.output
    assert "reward.max_failed_fraction 0.1 allows: fix the failure shown above" in ended.output


def test_what_was_learnt_is_saved_when_all_environments_are_lost_with_their_process(
    live_engine, arguments, tmp_path
):
    run_dir = tmp_path / "run"
    after_step_1 = f"{{num_turns: 4, log: {run_dir / 'metrics.jsonl'}}}"
    options = [f"environment.arguments={after_step_1}", "train.num_steps=2"]
    ended = finish(live_engine, tmp_path, 1, *arguments, *options, "train.save_interval=100")
    assert ended.exit_codes == [1] and ended.survivors == []
    assert "the worker of the environments: its process died with signal SIGKILL" in ended.output
    assert latest_step(run_dir / "checkpoints") == 1


@pytest.mark.slow
def test_dialogues_go_on_while_weights_are_pushed(live_engine, arguments, tmp_path):
    in_flight = [
        "rollout.in_flight_updates=true",
        "rollout.max_staleness=3",
        "grpo.rollout_importance_sampling_mode=token_truncate",
    ]
    ended = finish(live_engine, tmp_path, 1, *arguments, *in_flight, "train.num_steps=8")
    assert ended.exit_codes == [0], ended.output
    rows = read_json_lines(tmp_path / "run" / "completions.jsonl")
    each = {(row["step"], row["prompt_index"], row["sample_index"]) for row in rows}
    assert len(each) == len(rows) == 8 * 16
    assert any(len(row["turns"]) > 1 for row in rows)
    spans = [row.get("versions", [(row["policy_version"], 0)]) for row in rows]
    assert max(map(len, spans)) > 1
    for row, parts in zip(rows, spans, strict=True):
        versions = [version for version, _ in parts]
        assert versions == sorted({*versions}) and versions[0] == row["policy_version"]
        assert 0 <= row["step"] - 1 - versions[0] <= 3
