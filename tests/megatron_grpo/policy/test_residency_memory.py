"""Memory of a rank's process by phase: measured by the operating system, and planned."""

import os
from pathlib import Path

import pytest
import torch

from checkpoint_convert import read_shape
from helpers.models.tiny import tiny_model
from helpers.oracle.policies import Lengths, accumulate, pack_all, start_policy, tiny_config
from helpers.ranks.processes import run_ranks
from megatron_grpo.config.config import Config
from megatron_grpo.config.offload import Phase, parts_away, parts_copied
from megatron_grpo.planning.state import part_bytes, state_bytes
from megatron_grpo.policy.forward import compute_logprobs
from megatron_grpo.policy.optimizer import apply_gradient, gradient_norm
from megatron_grpo.policy.reference import build_reference
from megatron_grpo.policy.residency import build_residency
from parallel import ParallelDims

NUM_GENERATIONS = 3
WIDE = {
    "num_hidden_layers": 12,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
"""A model of 47 million parameters: its state is most of a rank's memory."""
ONE = ParallelDims()
CASES: list[tuple[ParallelDims, str, str]] = [
    *((ONE, offload, "float32") for offload in ("none", "optimizer", "[gradients]", "[weights]")),
    *((ONE, "all", dtype) for dtype in ("float32", "bfloat16")),
    *((two, "all", "float32") for two in (ParallelDims(tensor=2), ParallelDims(data=2))),
]
FEW_KERNELS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16", "LRU_CACHE_CAPACITY": "16"}
"""Caches of oneDNN and torch: about a megabyte for each product in bfloat16 and each length of a
microbatch; the default keeps 1,024 in each."""


def config(folder: Path, dims: ParallelDims, offload: str, dtype: str) -> Config:
    options = f"model.dtype={dtype}", f"train.offload={offload}", "grpo.beta=0.04"
    return tiny_config(folder, dims, *options, "rollout.enable_sleep_mode=true")


def held() -> int:
    """Bytes of this process, private and shared, without mapped files."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    sizes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return 1024 * (sizes["Anonymous"] + sizes["Pss_Shmem"])


def measure(
    rank: int, folder: Path, dims: ParallelDims, offload: str, dtype: str
) -> list[tuple[Phase, int]]:
    """Bytes at the start of each phase, beyond those before there was a model.

    Training is measured at its end, after freed memory is given back: gradients that were away have
    no pages before it fills them.
    """
    os.environ |= FEW_KERNELS
    empty = held()
    policy, groups = start_policy(rank, folder, dims, f"model.dtype={dtype}")
    cfg = config(folder, dims, offload, dtype)
    reference = build_reference(cfg, read_shape(folder), groups)
    residency = build_residency(
        cfg, policy, reference, torch.device("cpu"), num_ranks=dims.world_size
    )
    found: list[tuple[Phase, int]] = []
    for number in range(NUM_GENERATIONS):
        torch.cuda.empty_cache()  # as before each push
        if number:
            found.append(("train", held() - empty))
        phases: tuple[Phase, ...] = ("push", "generate", "log-probabilities")
        for phase in phases:
            residency.enter(phase)
            found.append((phase, held() - empty))
        lengths: Lengths = [[(60, 12 + number)] * 6, [(60, 9 + number)] * 4]
        batches = pack_all(lengths, dims)[groups.coordinates.data :: dims.data]
        for model in (policy, reference):
            compute_logprobs(model, batches, 1.0, groups)
        residency.enter("train")
        accumulate(policy, groups, batches)
        apply_gradient(policy.optimizer, gradient_norm(policy.optimizer))
        policy.optimizer.zero_grad()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("dims", "offload", "dtype"), CASES, ids=str)
def test_a_process_holds_the_planned_bytes_in_each_phase(
    tmp_path: Path, dims: ParallelDims, offload: str, dtype: str
) -> None:
    folder = tiny_model(tmp_path, "qwen3", tied=True, **WIDE)
    cfg = config(folder, dims, offload, dtype)
    measured = run_ranks(dims.world_size, measure, folder, dims, offload, dtype, timeout=300)
    for rank, found in enumerate(measured):
        state = state_bytes(cfg, read_shape(folder), rank)
        on_host = part_bytes(state, parts_copied(cfg.offload))
        first_step = [phase for phase, _ in found].index("train")
        for phase, held_now in found[first_step:]:
            planned = state.total - part_bytes(state, parts_away(cfg.offload, phase)) + on_host
            if phase == "log-probabilities" and "gradients" in parts_away(cfg.offload, "generate"):
                planned -= state.gradients  # gradients are back, without pages yet
            assert held_now == pytest.approx(planned, rel=0.05), (rank, phase)
