"""Configs of large runs with several features together, on tiny models on CPUs.

A twin is the shipped file with a random model of its family, one engine, and two steps of few
tokens. Its overrides are sizes, and what no CPU has; every other key stays.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from demo.make_squares import write
from helpers.engines.live import SGLANG_PYTHON, kernels_for, running_engine
from helpers.models.images import tiny_vision_model
from helpers.models.tiny import (
    add_mtp_layer,
    mixture_of_blocks,
    servable_model,
    talkative,
    tiny_model,
)
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
    has_engine: bool = True
    """Whether the run starts its own, instead of tests/reference_engine."""


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
    "grpo_744b_a40b": Twin(
        lambda folder: tiny_model(folder, "glm_moe_dsa"),
        ("tensor", "context"),
        ("rollout.vllm={}", "model.dtype=float32"),
        has_engine=False,  # neither vLLM nor SGLang has sparse attention on CPUs
    ),
    "grpo_30b_a3b_vl": Twin(
        lambda folder: tiny_vision_model(folder, "qwen3_vl_moe"),
        ("pipeline", "data"),
        (
            "rollout.vllm={max_model_len: 512, limit_mm_per_prompt: {image: 1, video: 0}}",
            "rollout.router_replay=false",  # vLLM returns experts on GPUs alone
            "model.dtype=float32",
        ),
    ),
    "grpo_671b_h100": Twin(
        lambda folder: add_mtp_layer(mixture_of_blocks(folder, "deepseek_v3")),
        ("pipeline", "data"),
        (
            "rollout.vllm={speculative_config: {method: mtp, num_speculative_tokens: 1}}",
            "rollout.router_replay=false",  # vLLM returns experts on GPUs alone
        ),
    ),
    "grpo_235b_a22b": Twin(
        lambda folder: mixture_of_blocks(folder, "qwen3_moe"),
        ("pipeline", "data"),
        (
            # SGLang returns experts on CPUs, too.
            *("rollout.vllm={}", "rollout.engine=sglang", f"rollout.python={SGLANG_PYTHON}"),
            "model.megatron.min_offloaded_tensor_size=0",
        ),
    ),
}


@pytest.mark.parametrize("name", TWINS)
def test_twin_of_a_config_learns_from_its_engine(name, tmp_path):
    twin, run_dir, data = TWINS[name], tmp_path / "run", write(tmp_path / "squares")
    model = twin.model(tmp_path / "model")
    options = f"model.path={model}", f"data.path={data}", *SMALL, *twin.options
    with ExitStack() as stack:
        engine = None
        if not twin.has_engine:
            engine = stack.enter_context(running_engine("reference", model, tmp_path / "logs"))
        stack.enter_context(kernels_for(model, "fp8"))
        config = TINY_CONFIG.with_name(f"{name}.yaml")
        finish_job(run_dir, *options, config=config, axes=twin.axes, engine=engine)
    records = read_metrics(run_dir)
    rounded = records[0].get("probe/quantized_logprob_gap_mean")
    shown = ("rollout/logprob_gap_mean", "reward", "grad_norm")
    print(name, rounded, [{key: record[key] for key in shown} for record in records])
    for record in records:
        # Engines of 8 bits: with the ranks' weights rounded as well, only activations differ.
        assert rounded < 0.1 if rounded else record["rollout/logprob_gap_mean"] < 1e-4
        assert record["reward"] > 0 and record["grad_norm"] > 0
    assert any(row["advantage"] for row in read_json_lines(run_dir / "completions.jsonl"))
