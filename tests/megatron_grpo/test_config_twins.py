"""Configs of large runs with several features together, on tiny models on CPUs.

A twin is the shipped file with a random model of its family, one engine, and two steps of few
tokens. Its overrides are sizes, and what no CPU has; every other key stays.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from demo.make_squares import write
from helpers.engines.live import kernels_for
from helpers.models.tiny import servable_model, talkative
from helpers.runs.jobs import finish_job
from helpers.runs.train import TINY_CONFIG, read_json_lines, read_metrics

pytestmark = pytest.mark.slow

SMALL = [
    *("data.prompt_column=prompt", "data.max_prompt_length=384"),
    "data.chat_template_kwargs={}",
    "rollout.max_completion_length=64",
    *("train.num_steps=2", "optimizer.lr_warmup_steps=0"),
    "train.max_tokens_per_microbatch=1024",
    "grpo.num_generations=4",
    "grpo.generation_batch_size=16",
    *("rollout.num_engines=1", "rollout.tensor_parallel_size=1", "rollout.data_parallel_size=1"),
    "parallel.expert_parallel_size=1",
    # Random completions have no final answer.
    "reward.functions=[demo/rewards.py:share_of_digits]",
    "wandb={}",
]


@dataclass(frozen=True)
class Twin:
    model: Callable[[Path], Path]
    axes: tuple[str, str]
    """Mesh axes of two ranks."""
    options: tuple[str, ...]
    gap: float = 1e-4
    """Most of `rollout/logprob_gap_mean`."""


def speaker(folder: Path) -> Path:
    return talkative(folder, servable_model(folder.with_name("base"), "llama"))


TWINS = {
    "grpo_70b_lora": Twin(
        speaker,
        ("tensor", "data"),
        (
            "rollout.vllm={max_model_len: 512}",
            "rollout.tool_call_parser=hermes",  # the tokenizer has no <|python_tag|>
            "model.dtype=float32",
        ),
    ),
}


@pytest.mark.parametrize("name", TWINS)
def test_twin_of_a_config_learns_from_its_engine(name, tmp_path):
    twin, run_dir, data = TWINS[name], tmp_path / "run", write(tmp_path / "squares")
    model = twin.model(tmp_path / "model")
    options = f"model.path={model}", f"data.path={data}", *SMALL, *twin.options
    with kernels_for(model, "fp8"):
        config = TINY_CONFIG.with_name(f"{name}.yaml")
        finish_job(run_dir, *options, config=config, axes=twin.axes)
    for record in read_metrics(run_dir):
        assert record["rollout/logprob_gap_mean"] < twin.gap
        assert record["reward"] > 0 and record["grad_norm"] > 0
    assert any(row["advantage"] for row in read_json_lines(run_dir / "completions.jsonl"))
