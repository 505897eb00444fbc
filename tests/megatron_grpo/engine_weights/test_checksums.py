"""Checksums that the ranks expect of an engine, against checksums of the weight files' shards."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from checkpoint_convert import hf_tensors
from helpers.engines.live import worker_sums
from helpers.models.tiny import tiny_model
from helpers.oracle.policies import start_policy
from helpers.pushes.policies import sums_of_push
from helpers.ranks.processes import run_ranks
from megatron_grpo.config.rollout import RolloutConfig
from megatron_grpo.engine_weights.layouts import worker_layouts
from megatron_grpo.engine_weights.protocol import WorkerSums
from parallel import Layout, ParallelDims
from parallel.checksum import checksums

ENGINES = [
    {"engine": "vllm"},
    {"engine": "vllm", "tensor_parallel_size": 2},
    {"engine": "vllm", "tensor_parallel_size": 4},  # two workers share a key-value head
    {"engine": "vllm", "tensor_parallel_size": 2, "vllm": {"enable_expert_parallel": True}},
    {"engine": "sglang"},
]


def rollouts() -> list[RolloutConfig]:
    return [RolloutConfig(max_completion_length=16, **engine) for engine in ENGINES]


def sums_of_ranks(rank: int, folder: Path, dims: ParallelDims) -> list[Sequence[WorkerSums]]:
    policy, groups = start_policy(rank, folder, dims, "model.dtype=float32")
    return [
        sums_of_push(policy, groups, worker_layouts(policy.shape, rollout), torch.float32)
        for rollout in rollouts()
    ]


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "tied", "dims"),
    [
        ("qwen3", True, ParallelDims()),
        ("qwen3", True, ParallelDims(tensor=2, pipeline=2)),
        ("qwen2", False, ParallelDims(pipeline=2, virtual_pipeline=2)),
        ("llama", False, ParallelDims(tensor=2, context=2)),
        ("llama", True, ParallelDims(data=2)),
        ("qwen3_moe", False, ParallelDims(data=2, expert=2)),
        ("qwen3_moe", False, ParallelDims(tensor=2)),
        ("deepseek_v3", False, ParallelDims(tensor=2, pipeline=2)),
    ],
    ids=str,
)
def test_every_parameter_of_every_worker_has_one_sum_at_every_layout(tmp_path, family, tied, dims):
    folder = tiny_model(tmp_path, family, tied=tied, num_hidden_layers=4)
    expected = [worker_sums(folder, rollout) for rollout in rollouts()]
    for sums in run_ranks(dims.world_size, sums_of_ranks, folder, dims):
        assert sums == expected


def test_sums_are_of_values_in_the_engines_dtype(tmp_path):
    folder = tiny_model(tmp_path, "qwen3")
    [sums] = run_ranks(1, bfloat16_sums, folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert sums == checksums(dict(model.named_parameters()))


def bfloat16_sums(rank: int, folder: Path) -> WorkerSums:
    policy, groups = start_policy(rank, folder, ParallelDims(), "model.dtype=float32")
    workers = [Layout.of_whole_tensors(hf_tensors(policy.shape))]
    [sums] = sums_of_push(policy, groups, workers, torch.bfloat16)
    return sums
