"""Muon's update of whole matrices of the weight files, whatever part of them each rank holds."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from checkpoint_convert import hf_tensors, read_shape
from helpers.models import tiny_model
from helpers.policies import start_policy
from helpers.ranks import run_ranks
from megatron_grpo.policy.muon import QUINTIC, newton_schulz
from megatron_grpo.policy.optimizer import apply_gradient, gradient_norm
from parallel import Box, ParallelDims

LR, WEIGHT_DECAY, MOMENTUM, SCALE = 1e-3, 0.1, 0.9, 0.3
MUON = [
    "optimizer.optimizer=muon",
    f"optimizer.lr={LR}",
    f"optimizer.weight_decay={WEIGHT_DECAY}",
    f"optimizer.muon_momentum={MOMENTUM}",
    f"optimizer.muon_extra_scale_factor={SCALE}",
    "optimizer.max_grad_norm=1e6",
]
NUM_STEPS = 2


@pytest.mark.parametrize("shape", [(5, 7), (9, 4), (1, 6)])
def test_singular_values_go_through_the_quintics(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.norm()
    for a, b, c in QUINTIC:
        values = a * values + b * values**3 + c * values**5
    found = newton_schulz(matrix.float()).double()
    torch.testing.assert_close(found, left @ values.diag() @ right, atol=1e-5, rtol=1e-5)


def gradient_of(name: str, size: tuple[int, ...], step: int) -> Tensor:
    """A gradient of a whole tensor of the weight files, the same at every layout."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)) + 1000 * step)
    return torch.randn(size, generator=generator)


def weights_after(
    rank: int, folder: Path, dims: ParallelDims
) -> list[tuple[str, Box, Tensor, Tensor]]:
    """This rank's boxes of the weights before and after `NUM_STEPS` made-up gradients."""
    policy, _ = start_policy(rank, folder, dims, *MUON)
    shapes = hf_tensors(policy.shape)
    boxes = [
        (piece, policy.parameters()[piece.local][piece.local_box.slices])
        for piece in policy.layout.pieces
        if policy.parameters()[piece.local].requires_grad
    ]
    before = [values.detach().clone() for _, values in boxes]
    for step in range(NUM_STEPS):
        policy.zero_grad()
        for piece, _ in boxes:
            gradient = gradient_of(piece.tensor, shapes[piece.tensor], step)
            values = policy.parameters()[piece.local].main_grad
            values[piece.local_box.slices] = gradient[piece.box.slices]
        apply_gradient(policy.optimizer, gradient_norm(policy.optimizer))
    return [
        (piece.tensor, piece.box, old, new.detach().clone())
        for (piece, new), old in zip(boxes, before, strict=True)
    ]


def assert_whole_updates(folder: Path, dims: ParallelDims) -> None:
    """Matrices are, to the bit, those of Muon on whole matrices; the others AdamW's."""
    results = run_ranks(dims.world_size, weights_after, folder, dims)
    shapes = hf_tensors(read_shape(folder))
    before = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
    for name, box, old, _ in (each for of_rank in results for each in of_rank):
        before[name][box.slices] = old
    want = {name: updated(name, weight) for name, weight in before.items()}
    for name, box, _, new in (each for of_rank in results for each in of_rank):
        if name in want:
            assert torch.equal(new, want[name][box.slices]), name


def updated(name: str, weight: Tensor) -> Tensor:
    gradients = [gradient_of(name, tuple(weight.shape), step) for step in range(NUM_STEPS)]
    if weight.dim() != 2 or name in ("model.embed_tokens.weight", "lm_head.weight"):
        weight = torch.nn.Parameter(weight.clone())
        decay = WEIGHT_DECAY if weight.dim() > 1 else 0.0
        adam = torch.optim.AdamW([weight], LR, (0.9, 0.95), 1e-8, weight_decay=decay)
        for gradient in gradients:
            weight.grad = gradient
            adam.step()
        return weight.detach()
    momentum = torch.zeros_like(weight)
    for gradient in gradients:
        momentum = momentum.lerp(gradient, 1 - MOMENTUM)
        update = newton_schulz(gradient.lerp(momentum, MOMENTUM))
        weight = weight * (1 - LR * WEIGHT_DECAY)
        weight = weight.add(update * (SCALE * math.sqrt(max(weight.shape))), alpha=-LR)
    return weight


@pytest.mark.parametrize(
    "dims",
    [
        ParallelDims(),
        ParallelDims(tensor=2, data=2),
        ParallelDims(tensor=2, pipeline=2, virtual_pipeline=2),
    ],
    ids=str,
)
def test_updates_have_the_same_bits_at_every_layout(dims, tmp_path):
    folder = tiny_model(tmp_path, "qwen3", tied=dims.pipeline == 1, num_hidden_layers=5)
    assert_whole_updates(folder, dims)


@pytest.mark.parametrize(
    ("family", "dims"),
    [
        ("qwen3_moe", ParallelDims(tensor=2, data=2, expert=2, expert_tensor=2)),
        ("qwen3_moe", ParallelDims(tensor=2, context=2, expert=2)),
        ("deepseek_v3", ParallelDims(tensor=2, pipeline=2)),
    ],
)
def test_those_of_experts_and_of_latents_too(family, dims, tmp_path):
    assert_whole_updates(tiny_model(tmp_path, family), dims)
