"""Within a microbatch the host never waits for a GPU, except in Megatron-Core's own layers.

A host that waits cannot queue the next microbatch, and the GPU idles in between. A CPU counts the
operations that would wait; tests/gpu/test_gpu_waits.py asks a GPU.
"""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.models.tiny import tiny_model
from helpers.oracle.policies import LENGTHS, pack_all, start_policy, tiny_config
from helpers.ranks.measure import counted_waits
from helpers.ranks.processes import run_ranks
from megatron_grpo.algorithm.loss_function import LossFunction
from megatron_grpo.batch.token_values import with_entropy_weights
from megatron_grpo.policy.forward import compute_logprobs
from megatron_grpo.train_step import accumulate_gradient
from parallel import ParallelDims
from parallel.attention import block_mask
from parallel.rank_part import context_indices

RECIPE = (
    "grpo.generation_batch_size=6",
    "grpo.num_generations=2",
    "grpo.beta=0.05",
    "grpo.loss_type=grpo",
    "grpo.importance_sampling_level=sequence",
    "grpo.rollout_importance_sampling_mode=sequence_mask",
    "grpo.rollout_rs=geometric",
    "grpo.off_policy_mask_threshold=0.02",
    "grpo.entropy_coef=0.1",
)
# Waits in torch's layers, in place of which GPUs have Transformer Engine's.
ROPE = "megatron/core/models/common/embeddings/rope_utils.py:_apply_rotary_pos_emb_thd"
ATTENTION = {"tolist in parallel/attention.py:packed_attention", f"tolist in {ROPE}"}
EXPERTS = {
    "tolist in megatron/core/transformer/moe/experts.py:forward",
    "tolist in megatron/core/transformer/moe/moe_utils.py:sort_chunks_by_idxs",
    # gloo's; with NCCL one wait in each layer, to learn how many tokens each expert gets.
    "tolist in parallel/cpu_device.py:as_list",
    "_local_scalar_dense in megatron/core/tensor_parallel/mappings.py:forward",
}
# Tensors that are on the host on a GPU, too.
OF_THE_HOST = {
    "lift_fresh in megatron/core/pipeline_parallel/schedules.py:forward_step_calc_loss",
    "lift_fresh in megatron/core/tensor_parallel/layers.py:forward",
    "_local_scalar_dense in megatron/core/tensor_parallel/random.py:fork",
}


def waits_of_a_step(rank: int, folder: Path, dims: ParallelDims, *overrides: str) -> Counter[str]:
    """Places where the host waits in a log-probability pass and in a step without its update."""
    policy, groups = start_policy(rank, folder, dims, *RECIPE, *overrides)
    cfg = tiny_config(folder, dims, *RECIPE, *overrides)
    packed = pack_all(LENGTHS, dims, share_prompts=cfg.grpo.shared_prompts)
    share = packed[groups.coordinates.data :: dims.data]
    batches = with_entropy_weights(
        [
            replace(batch, ref_logprobs=torch.zeros(len(batch.tokens)))
            for batch in (each.on_rank(dims, groups.coordinates) for each in share)
        ],
        groups,
    )
    function = LossFunction.of(cfg.grpo)
    with counted_waits() as waits:
        compute_logprobs(policy, batches, 1.0, groups)
        accumulate_gradient(policy, batches, cfg, groups, function, 0.05)
    return waits


@pytest.mark.parametrize(
    ("family", "dims", "overrides"),
    [
        ("llama", ParallelDims(), []),
        ("llama", ParallelDims(tensor=2), []),
        ("llama", ParallelDims(context=2), []),
        pytest.param(
            "llama", ParallelDims(context=2), ["grpo.shared_prompts=true"], marks=pytest.mark.slow
        ),
        ("llama", ParallelDims(context=2), ["parallel.dynamic_context_parallel=true"]),
        pytest.param("llama", ParallelDims(pipeline=2), [], marks=pytest.mark.slow),
        ("llama", ParallelDims(pipeline=2, virtual_pipeline=2), []),
        ("qwen3_moe", ParallelDims(data=2, expert=2), []),
    ],
    ids=str,
)
def test_nothing_but_layers_of_torch_waits(
    tmp_path: Path, family: str, dims: ParallelDims, overrides: list[str]
) -> None:
    folder = tiny_model(tmp_path, family, num_hidden_layers=4)
    allowed = (
        ATTENTION
        | {f"_local_scalar_dense in {ROPE}"}
        | OF_THE_HOST
        | (EXPERTS if "moe" in family else set())
    )
    for waits in run_ranks(dims.world_size, waits_of_a_step, folder, dims, *overrides):
        assert set(waits) <= allowed, waits
        assert set(waits) >= ATTENTION  # waits are counted


def test_the_mask_of_shared_prompts_is_made_without_waiting() -> None:
    cu_seqlens = torch.tensor([0, 640, 896, 1280, 1404], dtype=torch.int32)
    prefixes = torch.tensor([[(0, 0)], [(0, 637)], [(0, 637)], [(0, 0)]])
    with counted_waits() as waits:
        local = context_indices(cu_seqlens, 1, 2, 1404)
        block_mask(cu_seqlens, prefixes, local, 1404)
    assert not waits


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: x[x > 0],
        lambda x: x.tolist(),
        lambda x: x.nonzero(),
        lambda x: x.repeat_interleave(x),
        lambda x: x[[0, -1]],
        lambda x: torch.isin(x, x),
    ],
)
def test_an_operation_that_waits_is_counted(wait: Any) -> None:
    values = torch.tensor([1, 0, 2])
    with counted_waits() as waits:
        wait(values)
    assert waits
