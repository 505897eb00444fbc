"""Within a microbatch the host never waits for the GPU; torch reports the place of a wait."""

from pathlib import Path

import pytest
import torch

from helpers.models.tiny import tiny_model
from helpers.oracle.policies import pack_all, start_policy, tiny_config
from helpers.ranks.processes import run_ranks
from megatron_grpo.algorithm.loss_function import LossFunction
from megatron_grpo.policy.forward import compute_logprobs
from megatron_grpo.train_step import accumulate_gradient
from parallel import ParallelDims

LENGTHS = [[(5, 32), (3, 9)], [(20, 44)], [(7, 41)], [(9, 7), (9, 7)]]
"""Number of microbatches: a multiple of the pipeline's size, for interleaved stages."""
SHAPE = {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
RECIPE = (
    "model.dtype=bfloat16",
    "grpo.generation_batch_size=6",
    "grpo.num_generations=2",
    "grpo.beta=0",
    "grpo.loss_type=grpo",
    "grpo.importance_sampling_level=sequence",
    "grpo.rollout_importance_sampling_mode=sequence_mask",
)
RECOMPUTED = (
    "model.megatron={recompute_granularity: full, recompute_method: uniform, "
    "recompute_num_layers: 1}"
)
OFFLOADED = (
    "model.megatron={fine_grained_activation_offloading: true, min_offloaded_tensor_size: 0, "
    "offload_modules: [qkv_linear, core_attn, attn_proj]}"
)


def step_without_waiting(rank: int, folder: Path, dims: ParallelDims, *overrides: str) -> None:
    """A step without its update, and a log-probability pass, after kernels are compiled."""
    policy, groups = start_policy(rank, folder, dims, *RECIPE, *overrides)
    cfg = tiny_config(folder, dims, *RECIPE, *overrides)
    batches = [
        batch.on_rank(dims, groups.coordinates).to(f"cuda:{torch.cuda.current_device()}")
        for batch in pack_all(LENGTHS, dims, share_prompts=cfg.grpo.shared_prompts)
    ]
    for mode in ("default", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        compute_logprobs(policy, batches, 1.0, groups)
        accumulate_gradient(policy, batches, cfg, groups, LossFunction.of(cfg.grpo), 0.0)
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("dims", "overrides"),
    [
        (ParallelDims(), []),
        (ParallelDims(), [RECOMPUTED]),
        (ParallelDims(), [OFFLOADED]),
        (ParallelDims(), ["grpo.shared_prompts=true"]),
        (ParallelDims(tensor=2), []),
        (ParallelDims(context=2), []),
        (ParallelDims(pipeline=2), []),
        (ParallelDims(pipeline=2, virtual_pipeline=2), []),
    ],
    ids=str,
)
def test_a_microbatch_never_waits(tmp_path, dims, overrides):
    if torch.cuda.device_count() < dims.world_size:
        pytest.skip(f"needs {dims.world_size} GPUs")
    folder = tiny_model(tmp_path, "qwen3", **SHAPE)
    arguments = (folder, dims, *overrides)
    run_ranks(dims.world_size, step_without_waiting, *arguments, cuda=True, timeout=500)
