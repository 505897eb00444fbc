"""What a plan counts of a run with adapters."""

from pathlib import Path
from typing import Any

import pytest

from checkpoint_convert import read_shape
from helpers.models import tiny_model
from helpers.policies import layout_name, start_policy, tiny_config
from helpers.published_models import write_config
from helpers.ranks import run_ranks
from megatron_grpo.config.file import load_config
from megatron_grpo.planning.card import CARDS
from megatron_grpo.planning.instantiate import gradient_bytes, optimizer_bytes
from megatron_grpo.planning.job_plan import JobPlan, plan_job
from megatron_grpo.planning.state import state_bytes
from megatron_grpo.planning.workload import longest_sequence
from parallel import ParallelDims

R3 = ("lora.r=3", "lora.exclude_modules=[k_proj]", "grpo.beta=0.1", "model.dtype=bfloat16")


def held(rank: int, folder: Path, dims: ParallelDims) -> list[tuple[int, int]]:
    """Bytes of a rank's weights, gradients and optimizer: built, and planned."""
    policy, _ = start_policy(rank, folder, dims, *R3)
    planned = state_bytes(tiny_config(folder, dims, *R3), policy.shape, rank)
    weights = [*policy.parameters().values(), *policy.adapters.parameters().values()]
    assert planned.reference == 0
    return [
        (sum(each.nbytes for each in weights), planned.weights),
        (sum(each.nbytes for each in policy.parameters().values()), planned.frozen),
        (gradient_bytes(policy), planned.gradients),
        (optimizer_bytes(policy), planned.optimizer),
    ]


@pytest.mark.parametrize(
    "dims",
    [ParallelDims(tensor=2, pipeline=2), ParallelDims(data=2, pipeline=2)],
    ids=layout_name,
)
def test_a_rank_holds_what_is_planned(tmp_path, dims):
    folder = tiny_model(tmp_path / "model", "llama")
    for rank in run_ranks(dims.world_size, held, folder, dims):
        for built, planned in rank:
            assert built == planned


def plan(folder: Path, published: str, num_gpus: int | None, *overrides: Any) -> JobPlan:
    path = write_config(folder / published, published)
    cfg = load_config(Path("configs/grpo_70b_lora.yaml"), [f"model.path={path}", *overrides])
    shape = read_shape(path)
    return plan_job(cfg, shape, CARDS["h100"], [longest_sequence(cfg, shape)], num_gpus)


def test_a_node_holds_70b_with_adapters_and_four_hold_405b(tmp_path):
    one = plan(tmp_path, "Llama-3.3-70B", None)
    assert one.num_gpus == 8 and one.fits
    assert one.engine.pushed < 0.03 * one.engine.weights
    merged = plan(tmp_path, "Llama-3.3-70B", None, "lora.sync=merged")
    assert merged.engine.pushed == merged.engine.weights < one.engine.weights
    all_weights = plan(tmp_path, "Llama-3.3-70B", None, "lora.r=0")
    assert not all_weights.fits
    assert all_weights.time.estimate > 1.2 * one.time.estimate
    two_nodes_each = (
        "parallel.pipeline_parallel_size=2",
        "rollout.tensor_parallel_size=16",
        "rollout.vllm.gpu_memory_utilization=0.9",
    )
    assert plan(tmp_path, "Llama-3.1-405B", 32, *two_nodes_each).fits
