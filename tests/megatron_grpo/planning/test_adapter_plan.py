"""Plans of runs with adapters."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from checkpoint_convert import read_shape
from helpers.models.published import write_config
from helpers.models.tiny import tiny_model
from helpers.oracle.policies import layout_name, start_policy, tiny_config
from helpers.ranks.processes import run_ranks
from megatron_grpo.config.config import Config
from megatron_grpo.config.file import load_config
from megatron_grpo.planning.card import CARDS
from megatron_grpo.planning.command import print_plan
from megatron_grpo.planning.instantiate import gradient_bytes, instantiate, optimizer_bytes
from megatron_grpo.planning.job_plan import plan_job
from megatron_grpo.planning.state import stage_states, state_bytes
from megatron_grpo.planning.workload import Job, longest_sequence
from megatron_grpo.policy import lora
from megatron_grpo.policy.lora_targets import adapter_sender, local_targets
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
    "dims", [ParallelDims(tensor=2, pipeline=2), ParallelDims(data=2, pipeline=2)], ids=layout_name
)
def test_a_rank_holds_what_is_planned(tmp_path, dims):
    folder = tiny_model(tmp_path / "model", "llama")
    for rank in run_ranks(dims.world_size, held, folder, dims):
        for built, planned in rank:
            assert built == planned


STAYS = (
    *("train.offload=none", "parallel.tensor_parallel_size=8", "parallel.data_parallel_size=1"),
    "model.megatron={recompute_granularity: full, recompute_method: uniform, "
    "recompute_num_layers: 1}",
)
"""The ranks' state stays on the GPUs."""


def test_plan_of_405b_with_adapters_fits_on_four_nodes(tmp_path):
    path = write_config(tmp_path, "Llama-3.1-405B")
    nodes = "parallel.pipeline_parallel_size=2", "rollout.tensor_parallel_size=16"
    own = "rollout.enable_sleep_mode=false", "rollout.vllm.gpu_memory_utilization=0.9"
    given = [f"model.path={path}", *nodes, *own]
    cfg = load_config(Path("configs/grpo_70b_lora.yaml"), [*given, *STAYS])
    shape = read_shape(path)
    job = Job(cfg, shape, CARDS["h100"], [longest_sequence(cfg, shape)], 32)
    assert plan_job(job).fits


def test_plan_copies_frozen_weights_to_the_host_once(tmp_path):
    path = write_config(tmp_path, "Llama-3.3-70B")
    cfg = load_config(Path("configs/grpo_70b_lora.yaml"), [f"model.path={path}"])
    shape = read_shape(path)
    host = plan_job(Job(cfg, shape, CARDS["h100"], [longest_sequence(cfg, shape)], 32)).host
    frozen = max(each.frozen for each in stage_states(cfg, shape))
    assert host and host.moved - host.leaving == frozen > 0.8 * host.moved


OF_ALL = ("lora.r=3", "grpo.beta=0.1", "model.dtype=bfloat16")
BUILT = [
    ("llama", {"num_key_value_heads": 1}, ParallelDims(tensor=4, data=2), []),
    # Adapters on parts of fused layers, a tied embedding, and stages of unequal height.
    (
        "qwen3",
        {"tied": True, "num_hidden_layers": 3},
        ParallelDims(tensor=2, pipeline=2, num_layers_in_last_pipeline_stage=1),
        ["lora.target_modules=[q_proj,v_proj,mlp.up_proj]"],
    ),
    # The first projections of latents are whole on every tensor rank.
    (
        "deepseek_v3",
        {},
        ParallelDims(tensor=2, data=2, expert=4, expert_tensor=1, pipeline=3),
        ["lora.target_modules=[q_a_proj,q_b_proj,kv_b_proj,o_proj]", "lora.sync=merged"],
    ),
]


@pytest.mark.parametrize(
    ("family", "own", "dims", "overrides"),
    BUILT,
    ids=lambda value: layout_name(value) if isinstance(value, ParallelDims) else str(value),
)
def test_every_rank_of_a_job_is_built_as_planned(elsewhere, tmp_path, family, own, dims, overrides):
    cfg = tiny_config(tiny_model(tmp_path, family, **own), dims, *OF_ALL, *overrides)
    found = elsewhere(instantiate, cfg)
    assert found.faults == []
    assert "  frozen on a rank\n" in found.table
    merged = "lora.sync=merged" in overrides
    assert ("of a push: every element of adapters" in found.table) is not merged


def faults_with(name: str, replacement: Any, cfg: Config) -> list[str]:
    with patch.object(lora, name, replacement):
        return instantiate(cfg).faults


def sender_of_a_higher_rank(targets: Any, rank: int, *place: Any) -> Any:
    return adapter_sender(targets, rank + 1, *place)


def targets_without_the_last(*arguments: Any) -> Any:
    *targets, _ = local_targets(*arguments)
    return targets


@pytest.mark.parametrize(
    ("name", "replacement", "expected"),
    [
        (
            "adapter_sender",
            sender_of_a_higher_rank,
            "rank 1: 0.decoder.layers.1.mlp.linear_fc2.lora.b is [64, 3] bfloat16 as built and "
            "[64, 4] bfloat16 as planned",
        ),
        ("local_targets", targets_without_the_last, "rank 1: gradients take "),
    ],
)
def test_adapters_of_another_shape_or_in_other_layers_are_reported(
    elsewhere, tmp_path, name, replacement, expected
):
    cfg = tiny_config(tiny_model(tmp_path, "llama"), ParallelDims(tensor=2), *OF_ALL)
    faults = elsewhere(faults_with, name, replacement, cfg)
    assert any(fault.startswith(expected) for fault in faults)


ASLEEP = (*STAYS, "rollout.vllm.gpu_memory_utilization=0.5")


def test_weights_of_engines_asleep_are_in_the_memory_of_their_hosts(tmp_path, capsys, monkeypatch):
    """Each buffer takes a power of two of page-locked memory."""
    path = write_config(tmp_path / "model", "Llama-3.3-70B")
    on_one_node: Any = {"gpu": "h100", "num_gpus": None, "lengths_file": None, "as_json": False}

    def planned(*overrides: str) -> str:
        given = [f"model.path={path}", *ASLEEP, *overrides]
        print_plan(load_config(Path("configs/grpo_70b_lora.yaml"), given), **on_one_node)
        return capsys.readouterr().out

    ends, layer = [128256 // 8 * 8192] * 2, [8192, 8192, 8192 * 8192 // 8]
    layer += [(8192 + 2 * 1024) // 8 * 8192, 2 * 28672 // 8 * 8192, 8192 * 28672 // 8]
    weights = 8 * sum(1 << (2 * size - 1).bit_length() for size in [*ends, *80 * layer])
    out = planned()
    rows = [" ".join(line.split()) for line in out.splitlines()]
    # An eighth of 141 GB, and adapters.
    assert any(row.startswith("sleeping engines, each way 18.0 GB 0.28 s") for row in rows)
    [size] = [
        row.split()[0]
        for row in rows
        if row.endswith("GB engines that sleep with lora.sync adapter")
    ]
    assert 0 < float(size) - weights / 1e9 < 8 * 1
    small = replace(CARDS["h100"], host_memory=150 * 10**9)
    monkeypatch.setitem(CARDS, "h100", small)
    with pytest.raises(ValueError, match=r"168\.3 for engines that sleep with lora\.sync adapter"):
        planned()
    capsys.readouterr()
    assert "sleeping engines" not in planned("lora.sync=merged")
    assert "host memory of a node" not in planned("rollout.enable_sleep_mode=false")
