"""Muon's update of whole matrices of the weight files, whatever part of them each rank holds."""

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from checkpoint_convert import hf_tensors, read_shape
from helpers.models.tiny import tiny_model
from helpers.oracle.optimizers import orthogonalized
from helpers.oracle.policies import (
    LENGTHS,
    LOSS_WEIGHT,
    Boxes,
    accumulate,
    boxes_of,
    checkpoints_of,
    load_oracle,
    own_share,
    pack_all,
    save_checkpoint,
    sequence_logprobs,
    start_policy,
    unstacked,
)
from helpers.ranks.processes import run_ranks
from megatron_grpo.policy.model import Policy
from megatron_grpo.policy.muon import newton_schulz
from megatron_grpo.policy.optimizer import apply_gradient, gradient_norm
from parallel import ParallelDims

LR, WEIGHT_DECAY, MOMENTUM, SCALE, EPSILON = 1e-3, 0.1, 0.9, 0.3, 1e-3
MUON = [
    "optimizer.optimizer=muon",
    f"optimizer.lr={LR}",
    f"optimizer.weight_decay={WEIGHT_DECAY}",
    f"optimizer.muon_momentum={MOMENTUM}",
    f"optimizer.muon_extra_scale_factor={SCALE}",
    f"optimizer.adam_eps={EPSILON}",
]
BFLOAT16 = "model.dtype=bfloat16", "optimizer.grad_reduce_in_fp32=false"
EMBEDDINGS = ("model.embed_tokens.weight", "lm_head.weight")


def trained_boxes(policy: Policy) -> Boxes:
    weights = {name: p for name, p in policy.parameters().items() if p.requires_grad}
    return boxes_of(policy, weights, replicas=True)


@pytest.mark.parametrize("shape", [(5, 7), (9, 4), (1, 6)])
def test_newton_schulz_maps_singular_values_by_the_quintics(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    expected = orthogonalized(matrix).float()
    torch.testing.assert_close(newton_schulz(matrix), expected, atol=1e-5, rtol=1e-5)
    assert newton_schulz(torch.zeros(shape)).equal(torch.zeros(shape))


def gradient_of(name: str, size: tuple[int, ...], step: int) -> Tensor:
    """A made-up gradient of a whole tensor, the same at every layout."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)) + 1000 * step)
    return torch.randn(size, generator=generator)


def weights_after(
    rank: int,
    folder: Path,
    dims: ParallelDims,
    steps: Sequence[int],
    start: Path | None,
    dtype: torch.dtype,
) -> Boxes:
    """This rank's boxes of trained weights after `steps`; also saved in the model's folder."""
    kind = () if dtype == torch.float32 else BFLOAT16
    policy, _ = start_policy(rank, folder, dims, *MUON, "optimizer.max_grad_norm=1e6", *kind)
    if start:
        checkpoints_of(start, policy, folder, dims).load()
    shapes, parameters = hf_tensors(policy.shape), policy.parameters()
    pieces = [p for p in policy.layout.pieces if parameters[p.local].requires_grad]
    for step in steps:
        policy.zero_grad()
        for piece in pieces:
            gradient = gradient_of(piece.tensor, shapes[piece.tensor], step)
            part = parameters[piece.local].main_grad[piece.local_box.slices]
            part.copy_(gradient[piece.box.slices])
        apply_gradient(policy.optimizer, gradient_norm(policy.optimizer))
        policy.scheduler.step(increment=1)
    if start is None:
        save_checkpoint(folder, 1, policy, folder, dims)
    return trained_boxes(policy)


def updated(name: str, weight: Tensor, steps: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A whole tensor after the same steps, before it is rounded to `dtype`."""
    weight = weight.to(dtype).float()
    gradients = [gradient_of(name, tuple(weight.shape), s).to(dtype).float() for s in steps]
    if weight.dim() != 2 or name in EMBEDDINGS:
        weight = torch.nn.Parameter(weight.clone())
        decay = WEIGHT_DECAY if weight.dim() > 1 else 0.0
        adam = torch.optim.AdamW([weight], LR, (0.9, 0.95), EPSILON, decay)
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


def assert_whole_updates(
    folder: Path,
    dims: ParallelDims,
    steps: Sequence[int] = (0, 1),
    start: Path | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Assert that Muon updates whole matrices, and AdamW the other tensors, bit for bit."""
    shape = read_shape(folder)
    weights = unstacked(load_file(folder / "model.safetensors"), shape)
    own_steps = steps[-1:] if start else steps
    seen = set()
    for of_rank in run_ranks(dims.world_size, weights_after, folder, dims, own_steps, start, dtype):
        for name, box, values in of_rank:
            seen.add(name)
            want = updated(name, weights[name], steps, dtype).to(dtype)
            assert torch.equal(values, want[box.slices]), name
    assert seen == {name for name in weights if not name.endswith("e_score_correction_bias")}


@pytest.mark.parametrize(
    ("family", "dims"),
    [
        ("qwen3", ParallelDims()),
        ("qwen3", ParallelDims(tensor=2, data=2)),
        ("qwen3_moe", ParallelDims(tensor=2, data=2, expert=2)),
        pytest.param(  # context ranks are data ranks to it, as in the oracle's steps below
            "qwen3_moe", ParallelDims(context=2, data=2, expert=2), marks=pytest.mark.slow
        ),
        ("deepseek_v3", ParallelDims(tensor=2, data=2, expert=4, expert_tensor=1)),
    ],
)
def test_muon_updates_have_the_same_bits_at_every_layout(family, dims, tmp_path):
    assert_whole_updates(tiny_model(tmp_path, family), dims)


def test_muon_updates_bfloat16_weights_in_float32(tmp_path):
    folder = tiny_model(tmp_path, "qwen3")
    assert_whole_updates(folder, ParallelDims(tensor=2, data=2), dtype=torch.bfloat16)


def test_muon_momenta_come_back_from_another_layout(tmp_path):
    folder = tiny_model(tmp_path, "qwen3_moe")
    assert_whole_updates(folder, ParallelDims(tensor=2, data=2, expert=2), steps=(0,))
    others = ParallelDims(pipeline=2)
    assert_whole_updates(folder, others, steps=(0, 1), start=folder)


def weights_trained(rank: int, folder: Path, dims: ParallelDims) -> Boxes:
    """This rank's boxes of the weights after three steps of real gradients, which are clipped."""
    policy, groups = start_policy(rank, folder, dims, *MUON, "optimizer.max_grad_norm=1.0")
    for _ in range(3):
        accumulate(policy, groups, own_share(pack_all(LENGTHS, dims), groups))
        apply_gradient(policy.optimizer, gradient_norm(policy.optimizer))
    return trained_boxes(policy)


def weights_by_oracle(folder: Path) -> dict[str, Tensor]:
    """Weights after the same steps in float64 by transformers and by singular values."""
    model = load_oracle(folder)
    weights = dict(model.named_parameters())
    matrices = {n: p for n, p in weights.items() if p.dim() == 2 and n not in EMBEDDINGS}
    others = [p for n, p in weights.items() if n not in matrices]
    adam = torch.optim.AdamW(
        [
            {"params": [p for p in others if p.dim() > 1], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in others if p.dim() == 1], "weight_decay": 0.0},
        ],
        LR,
        (0.9, 0.95),
        EPSILON,
    )
    momenta = {name: torch.zeros_like(weight) for name, weight in matrices.items()}
    for _ in range(3):
        model.zero_grad()
        (-LOSS_WEIGHT * torch.cat(sequence_logprobs(model, LENGTHS)).sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        with torch.no_grad():
            for name, weight in matrices.items():
                momenta[name] = MOMENTUM * momenta[name] + (1 - MOMENTUM) * weight.grad
                nesterov = MOMENTUM * momenta[name] + (1 - MOMENTUM) * weight.grad
                update = SCALE * math.sqrt(max(weight.shape)) * orthogonalized(nesterov)
                weight.sub_(LR * (update + WEIGHT_DECAY * weight))
    return {name: weight.detach() for name, weight in weights.items()}


@pytest.mark.parametrize(
    "dims", [ParallelDims(tensor=2, pipeline=2), ParallelDims(context=2, data=2)], ids=str
)
def test_muon_steps_equal_those_of_the_oracle(dims, tmp_path):
    folder = tiny_model(tmp_path, "qwen3")
    want = weights_by_oracle(folder)
    for of_rank in run_ranks(dims.world_size, weights_trained, folder, dims):
        for name, box, values in of_rank:
            error = float((values - want[name][box.slices]).abs().max())
            assert error < 1e-5, f"{name}: {error:.1e}"
