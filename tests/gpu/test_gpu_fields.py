"""Switches of Transformer Engine's layers and of communication change nothing but rounding."""

from pathlib import Path

import pytest
import torch
from megatron.core.transformer.moe import fused_a2a
from torch import Tensor

from helpers.models.tiny import tiny_model
from helpers.oracle.policies import accumulate, pack_all, start_policy
from helpers.ranks.processes import run_ranks
from megatron_grpo.policy.forward import compute_logprobs
from megatron_grpo.policy.optimizer import apply_gradient, gradient_norm
from parallel import ParallelDims

LENGTHS = [[(5, 32), (3, 9), (20, 44)], [(7, 41)], [(9, 7), (9, 7)], [(6, 30)]]
SHAPE = {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
EXPERTS = {"moe_intermediate_size": 128}
ALONE, SPREAD = ParallelDims(), ParallelDims(data=2, expert=2)
FLEX = "model.megatron.moe_token_dispatcher_type=flex"


def steps(rank: int, folder: Path, dims: ParallelDims, overrides: list[str]) -> list[Tensor]:
    """(gradient norm, mean log-probability) of three steps."""
    policy, groups = start_policy(
        rank, folder, dims, "model.dtype=bfloat16", "optimizer.lr=1e-3", *overrides
    )
    share = [
        batch.to(f"cuda:{torch.cuda.current_device()}")
        for batch in pack_all(LENGTHS, dims)[groups.coordinates.data :: dims.data]
    ]
    seen = []
    for _ in range(3):
        values = compute_logprobs(policy, share, 1.0, groups)
        seen += [
            logprobs[b.loss_mask].mean().cpu()
            for b, (logprobs, _) in zip(share, values, strict=True)
        ]
        accumulate(policy, groups, share)
        norm = gradient_norm(policy.optimizer)
        apply_gradient(policy.optimizer, norm)
        seen.append(torch.tensor(norm))
    return seen


@pytest.mark.parametrize(
    ("family", "dims", "overrides"),
    [
        (
            "qwen3",
            ParallelDims(data=2),
            ["parallel.overlap_grad_reduce=true", "parallel.overlap_param_gather=true"],
        ),
        (
            "qwen3_moe",
            SPREAD,
            ["parallel.overlap_grad_reduce=true", "parallel.overlap_param_gather=true"],
        ),
        ("qwen3", ParallelDims(context=2), ["model.megatron.cp_comm_type=a2a"]),
        ("qwen3", ALONE, ["model.megatron.apply_rope_fusion=false"]),
        ("qwen3_moe", ALONE, ["model.megatron.moe_permute_fusion=false"]),
        ("qwen3_moe", SPREAD, ["model.megatron.moe_permute_fusion=false"]),
        ("qwen3_moe", ALONE, ["model.megatron.moe_router_fusion=true"]),
        ("glm4_moe", SPREAD, ["model.megatron.moe_shared_expert_overlap=true"]),
        ("qwen3_moe", SPREAD, [FLEX]),
        ("qwen3_moe", SPREAD, [FLEX, "model.megatron.moe_flex_dispatcher_backend=hybridep"]),
    ],
    ids=str,
)
def test_a_switch_changes_no_more_than_rounding(tmp_path, family, dims, overrides):
    if torch.cuda.device_count() < dims.world_size:
        pytest.skip(f"needs {dims.world_size} GPUs")
    kernels = fused_a2a.hybrid_ep_dispatch if len(overrides) > 1 else fused_a2a.fused_dispatch
    if FLEX in overrides and kernels is None:
        pytest.skip("needs deep_ep")
    folder = tiny_model(tmp_path, family, **SHAPE, **(EXPERTS if "moe" in family else {}))
    plain = run_ranks(dims.world_size, steps, folder, dims, [], cuda=True, timeout=240)
    switched = run_ranks(dims.world_size, steps, folder, dims, overrides, cuda=True, timeout=240)
    for one, other in zip(switched, plain, strict=True):
        torch.testing.assert_close(torch.stack(one), torch.stack(other), rtol=3e-2, atol=0)
