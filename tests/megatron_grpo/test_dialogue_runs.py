"""Whole runs with dialogues, alone or among other completions, on a real engine."""

import signal
from collections import Counter
from pathlib import Path

import pytest

from checkpoint_convert import read_shape
from checkpoint_convert.tokenizer import load_tokenizer
from helpers.models.tiny import talkative
from helpers.runs.in_flight import newest_folder, newest_groups
from helpers.runs.jobs import finish_job, start_job
from helpers.runs.train import read_json_lines, read_metrics, steps_of
from megatron_grpo.checkpoints.experience_file import OPEN, SAMPLES_FILE
from megatron_grpo.checkpoints.folders import latest_step
from megatron_grpo.config.file import load_config
from megatron_grpo.engines.choice import CUT
from megatron_grpo.engines.http import is_healthy
from megatron_grpo.rollout.services import load_stream

FILE = """
import os, signal

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

async def ask_twice(client, row):
    messages = [{"role": "user", "content": row["prompt"]}]
    for _ in range(2):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        text = answer.choices[0].message.content
        messages = [{"role": "user", "content": "something else"}]
    return len(text) / 100
"""
pytestmark = pytest.mark.engines

KINDS = {"plain": 2, "game": 1, "agent": 1}
"""Files of eight prompts each, and their weights in the data of several sources."""
LABELS = {"plain": "share_of_digits", "game": "environment", "agent": "agent"}
"""Names of their rewards."""
IN_HALVES = "grpo.steps_per_generation=2"
IN_FLIGHT = [
    "rollout.in_flight_updates=true",
    "rollout.max_staleness=3",
    "grpo.rollout_importance_sampling_mode=token_truncate",
    "train.num_steps=8",
]


@pytest.fixture(scope="module")
def arguments(tied_model: Path, tmp_path_factory) -> list[str]:
    """Arguments of a run of several sources; its environment asks in vain for a fourth turn."""
    folder = tmp_path_factory.mktemp("talkative")
    model, file = talkative(folder / "model", tied_model), folder / "mine.py"
    file.write_text(FILE)
    for kind in KINDS:
        rows = [f'{{"prompt": "{kind} {i}", "answer": "{i}", "kind": "{kind}"}}' for i in range(8)]
        (folder / f"{kind}.jsonl").write_text("\n".join(rows) + "\n")
    game = f"{{name: {file}:Digits, max_turns: 3, arguments: {{num_turns: 4}}}}"
    paths = [f"{{path: {folder / kind}.jsonl, weight: {KINDS[kind]}}}" for kind in KINDS]
    return [
        f"model.path={model}",
        f"data.path=[{', '.join(paths)}]",
        "data.max_prompt_length=60",
        "rollout.max_completion_length=200",
        "reward.functions=[]",
        "sources.column=kind",
        "sources.by_name.plain.reward.functions=[demo/rewards.py:share_of_digits]",
        f"sources.by_name.game.environment={game}",
        f"sources.by_name.agent.agent.function={file}:ask_twice",
        f"eval.data={{path: {folder / 'game.jsonl'}}}",
        "eval.max_prompts=3",
        "eval.num_generations=2",
        "eval.pass_threshold=0.5",
    ]


@pytest.fixture
def game(arguments: list[str]) -> list[str]:
    """Arguments of a run with dialogues only."""
    model, folder = arguments[0], Path(arguments[0].partition("=")[2]).parent
    return [
        model,
        f"data.path={folder / 'game.jsonl'}",
        f"environment.name={folder / 'mine.py'}:Digits",
        "environment.arguments={num_turns: 4}",
        "environment.max_turns=3",
        "rollout.max_completion_length=200",
        "reward.functions=[]",
    ]


@pytest.fixture(scope="module")
def tour(live_engine, arguments: list[str], tmp_path_factory) -> Path:
    """A run of two ranks, resumed amid its only generation of 8 prompts; its engine, which is
    given, outlives it."""
    run_dir = tmp_path_factory.mktemp("tour") / "run"
    options = [*arguments, IN_HALVES, "grpo.generation_batch_size=32"]
    for num_steps in (1, 2):
        steps = f"train.num_steps={num_steps}"
        finish_job(run_dir, *options, steps, engine=live_engine, axes=["data"])
        assert is_healthy(live_engine.servers.base_urls[0])
    return run_dir


@pytest.mark.long
def test_completions_are_of_each_kind_in_the_shares_of_the_data(tour):
    rows = read_json_lines(tour / "completions.jsonl")
    assert len(rows) == 32
    others = {"plain": None, "game": "environment", "agent": "user"}
    for row in rows:
        kind, turns = row["columns"]["kind"], row.get("turns", [])
        assert [*row["rewards"]] == [LABELS[kind]]
        assert kind in row["prompt"]
        assert bool(turns) == (kind != "plain")
        assert {turn["role"] for turn in turns[1::2]} <= {others[kind]}
        assert {turn["role"] for turn in turns[::2]} <= {"assistant"}
        assert len(turns) == 3 or kind != "agent"
    prompts = [row["prompt_index"] for row in rows]
    assert all(prompts.count(index) == 4 for index in prompts)
    dialogue = next(row for row in rows if row["finish_reason"] == "max_turns")["completion"]
    assert dialogue.count(" digits<eos>\n<start>assistant\n") == 2


def test_metrics_of_sources_are_those_of_their_completions(tour):
    _, *records = read_metrics(tour)
    assert [record["step"] for record in records] == [1, 2]
    for record in records:
        shares = {kind: record[f"source/{kind}/share"] for kind in KINDS}
        assert shares == {"plain": 0.5, "game": 0.25, "agent": 0.25}
        assert record["source/plain/num_turns/mean"] == 1
        assert 1 < record["source/game/num_turns/mean"] <= record["num_turns/max"] <= 3
        assert record["source/agent/num_turns/mean"] == record["agent/branches_mean"] == 2
        assert record["agent/failed_ratio"] == record["environment/failed_ratio"] == 0
        for kind, reward in LABELS.items():
            mean = pytest.approx(record[f"reward/{reward}/mean"])  # summed in another order
            assert record[f"source/{kind}/reward"] == mean
        assert record["grad_norm"] > 0
        # The engine's log-probabilities are of the very tokens that are trained on.
        assert record["rollout/logprob_gap_max"] < 1e-4


def test_evaluations_play_dialogues(tour):
    for record in read_metrics(tour):
        assert record["eval/num_prompts"] == 3
        assert 1 < record["eval/num_turns/mean"] <= 3
        assert record["eval/mean@2"] == record["eval/reward/environment/mean"]


@pytest.mark.long
def test_failed_dialogues_are_masked_up_to_a_limit(live_engine, game, tmp_path):
    """They fail before their first turn, without a token. Rewards are of turns, and of a function
    at the end."""
    fails = [
        *game,
        "environment.arguments={num_turns: 4, fails_at: '3'}",
        "grpo.supervision=process",
        "reward.functions=[demo/rewards.py:share_of_digits]",
        IN_HALVES,
    ]
    run_dir, outputs = tmp_path / "run", ""
    for num_steps in (1, 3, 4):  # twice the run ends inside of a generation
        steps = [f"train.num_steps={num_steps}", "reward.max_failed_fraction=0.5"]
        outputs += finish_job(run_dir, *fails, *steps, engine=live_engine).output
    assert len(read_json_lines(run_dir / "completions.jsonl")) == 32
    # Each of the eight prompts comes once in two generations, with four samples of sixteen.
    records = read_metrics(run_dir)
    assert sorted(record["environment/failed_ratio"] for record in records) == [0, 0, 0.25, 0.25]
    for record in records:
        assert record["grad_norm"] > 0 and record["rollout/logprob_gap_max"] < 1e-4
        assert record["reward/environment/mean"] > 0 < record["reward/share_of_digits/mean"]
        assert record["num_turns/mean"] > 1
    assert "the environment failed in 4 samples, the first of them: prompt 3," in outputs
    assert "RuntimeError: out of order" in outputs
    limit = ["train.num_steps=4", "reward.max_failed_fraction=0.1"]
    ended = finish_job(tmp_path / "other", *fails, *limit, engine=live_engine, code=1)
    assert "the environment failed in 4 samples, the first of them: prompt 3," in ended.output
    assert "4 of 16 completions have no score so far" in ended.output
    assert "reward.max_failed_fraction 0.1 allows: fix the failure shown above" in ended.output


def test_steps_are_saved_when_environments_are_lost(live_engine, game, tmp_path):
    """With their process, which dies once a step is logged."""
    run_dir = tmp_path / "run"
    after_step_1 = f"{{num_turns: 4, log: {run_dir / 'metrics.jsonl'}}}"
    options = [f"environment.arguments={after_step_1}", "train.save_interval=100"]
    ended = finish_job(run_dir, *game, *options, engine=live_engine, code=1)
    died = f"its process died with signal {signal.SIGKILL.name}"
    assert f"the worker of the environments: {died}" in ended.output
    assert latest_step(run_dir / "checkpoints") == 1


@pytest.mark.slow
def test_dialogues_go_on_while_weights_are_pushed(live_engine, game, tmp_path):
    finish_job(tmp_path / "run", *game, *IN_FLIGHT, engine=live_engine)
    rows = read_json_lines(tmp_path / "run" / "completions.jsonl")
    for record in read_metrics(tmp_path / "run"):
        of_step = [row for row in rows if row["step"] == record["step"]]
        share = sum(row["finish_reason"] == "max_turns" for row in of_step) / 16
        assert record["num_turns/clipped_ratio"] == share
        mean = sum(row["rewards"]["environment"] for row in of_step) / 16
        assert record["reward/environment/mean"] == record["reward"] == pytest.approx(mean)
    each = {(row["step"], row["prompt_index"], row["sample_index"]) for row in rows}
    assert len(each) == len(rows) == 8 * 16
    assert any(len(row["turns"]) > 1 for row in rows)
    spans = [row.get("versions", [(row["policy_version"], 0)]) for row in rows]
    assert max(map(len, spans)) > 1
    for row, parts in zip(rows, spans, strict=True):
        versions = [version for version, _ in parts]
        assert versions == sorted({*versions}) and versions[0] == row["policy_version"]
        assert 0 <= row["step"] - 1 - versions[0] <= 3


@pytest.mark.slow
def test_with_over_sampling_a_kill_loses_no_prompt_and_no_finished_session(
    live_engine, arguments, tmp_path
):
    run_dir = tmp_path / "run"
    options = [*arguments, *IN_FLIGHT, "rollout.over_sampling=2.5", "train.save_interval=2"]
    with start_job(run_dir, *options, engine=live_engine) as job:
        job.wait_for(lambda: len(steps_of(run_dir)) >= 5, seconds=120)
        job.signal(signal.SIGKILL)
        assert job.end(60).exit_codes == [-signal.SIGKILL]
    saved = read_json_lines(newest_folder(run_dir) / f"{OPEN}{SAMPLES_FILE}")
    finish_job(run_dir, *options, engine=live_engine)

    rows = read_json_lines(run_dir / "completions.jsonl")
    taken = Counter((row["step"], row["prompt_index"]) for row in rows)
    assert {*taken.values()} == {4} and len(taken) == 8 * 4
    cfg = load_config(run_dir / "config.yaml")
    stream = load_stream(cfg, read_shape(cfg.model.path), load_tokenizer(cfg.model.path))
    groups = newest_groups(run_dir)
    row_of = [stream.batch(n // 4)[n % 4].index for n in range(groups.next_number)]
    untaken = [row_of[number] for number in groups.untaken]
    assert Counter(row for _, row in taken) + Counter(untaken) == Counter(row_of)

    made = {(row["prompt_index"], row["sample_index"], row["completion"]) for row in rows}
    kinds = {row["prompt_index"]: row["columns"]["kind"] for row in rows}
    finished = [row for row in saved if row["finish_reason"] != CUT]
    assert {kinds[row["prompt"]] for row in finished} > {"plain"}
    lost = {(row["prompt"], row["sample_index"], row["text"]) for row in finished} - made
    dropped = sum(record.get("rollout/dropped_stale", 0) for record in read_metrics(run_dir))
    assert len(lost) <= 4 * dropped
    for row in rows:
        for version, _ in row.get("versions", [(row["policy_version"], 0)]):
            assert 0 <= row["step"] - 1 - version <= 3
