"""Written generations are replayed bit for bit by a run that fits them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from checkpoint_convert import read_shape
from checkpoint_convert.tokenizer import load_tokenizer
from helpers.oracle.policies import tiny_config
from helpers.runs.rewards import sample_of
from megatron_grpo.batch.experience import Experience
from megatron_grpo.config.config import Config
from megatron_grpo.data.stream import PromptStream
from megatron_grpo.engines.http import RolloutAborted
from megatron_grpo.rollout.generation import RolloutBatch
from megatron_grpo.rollout.replay import Replay, check_replay, write_generation
from megatron_grpo.rollout.services import load_stream
from megatron_grpo.timing import PhaseTimer
from parallel import ParallelDims

METRICS = {"rollout/num_engines": 1, "reward/failed": 0, "unfiltered/reward": 0.1 + 0.2}
SIZES = ("grpo.generation_batch_size=4", "grpo.num_generations=2", "train.num_steps=2")


@pytest.fixture
def config(tied_model: Path, tmp_path: Path):
    """A run on six rows in `dumped`, with overrides; the second row's answer is no number."""
    answers = ["1", "####", *["1"] * 4]
    rows = [{"prompt": f"{i}", "answer": answer} for i, answer in enumerate(answers)]
    (path := tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths = f"data.path={path}", f"train.run_dir={tmp_path / 'dumped'}"

    def make(*overrides: str) -> Config:
        return tiny_config(tied_model, ParallelDims(), *paths, *SIZES, *overrides)

    return make


def stream_of(cfg: Config) -> PromptStream:
    return load_stream(cfg, read_shape(cfg.model.path), load_tokenizer(cfg.model.path))


def test_load_stream_leaves_out_rows_that_rewards_cannot_read(config) -> None:
    stream = stream_of(config("reward.functions=[math_answer]", "data.on_invalid=skip"))
    assert [prompt.index for prompt in stream.prompts] == [0, 2, 3, 4, 5]


def write(cfg: Config, *generations: int) -> Experience:
    """Write generations that all have the same made-up samples; return these."""
    stream = stream_of(cfg)
    samples = [
        sample_of(
            "żółw",
            {},
            number=i,
            prompt=prompt,
            completion_ids=(5, 6 + i),
            logprobs=(-0.1, -1 / 3),
            policy_version=7,
        )
        for prompt in stream.prompts[:2]
        for i in range(2)
    ]
    totals = torch.tensor([0.1, 0.2, 0.3, torch.nan], dtype=torch.float64)
    rewards = [{"digits": total} for total in totals.tolist()]
    experience = Experience(samples, rewards, totals, torch.tensor([0, 0, 1, 1]), totals / 3)
    for generation in generations:
        write_generation(cfg, generation, RolloutBatch(experience, METRICS), stream.fingerprint)
    return experience


def replayed(config: Callable[..., Config], generation: int, *overrides: str) -> RolloutBatch:
    cfg = config(f"train.replay={config().train.run_dir}", *overrides)
    replay = Replay(cfg, read_shape(cfg.model.path), lambda: False)
    return replay.finish(generation, PhaseTimer(lambda phase: None))


def test_replay_reads_a_generation_as_it_was_made(config) -> None:
    written, read = write(config(), 0, 1), replayed(config, 1)
    assert read.metrics == METRICS
    assert read.experience.samples == written.samples
    for name in ("totals", "advantages", "group_ids"):
        ours, theirs = getattr(read.experience, name), getattr(written, name)
        assert torch.equal(ours.nan_to_num(-1), theirs.nan_to_num(-1))


def test_replay_lets_ranks_save_where_reading_fails(config, monkeypatch) -> None:
    write(config(), 0)

    def unavailable(*_) -> Experience:
        raise TimeoutError(110, "Connection timed out")

    monkeypatch.setattr("megatron_grpo.rollout.replay.read_experience", unavailable)
    with pytest.raises(RolloutAborted, match=r"reading generation 0 failed: .*timed out"):
        replayed(config, 0)


def test_replay_refuses_other_prompts(config) -> None:
    write(config(), 0)
    with pytest.raises(ValueError, match=r"0 was drawn from 6 prompts .* now give 6 prompts of"):
        replayed(config, 0, "data.apply_chat_template=false")


CHOSEN = ("rollout.engine=sglang", "rollout.vllm={}", "rollout.indexer_replay=true")


@pytest.mark.parametrize(
    ("generations", "overrides", "error"),
    [
        ((), (), "has no generations: run it with train.save_generations=true first"),
        ((0,), (), "has 1 generation, and 2 steps need 2: set train.num_steps to at most 1"),
        ((0,), ("grpo.num_generations=4",), "'grpo.num_generations': 2}, and this config has"),
        ((0,), CHOSEN, "'rollout.indexer_replay': True}: set them as they were"),
    ],
)
def test_check_replay_refuses_too_few_or_other_sizes(config, generations, overrides, error) -> None:
    write(config(), *generations)
    source = f"train.replay={config().train.run_dir}"
    with pytest.raises(ValueError) as refused:
        check_replay(config(source, *overrides))
    assert error in str(refused.value)


def test_check_replay_takes_enough_generations(config) -> None:
    write(config(), 0, 1)
    check_replay(config(f"train.replay={config().train.run_dir}"))
    check_replay(config("train.num_steps=3"))
