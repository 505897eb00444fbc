from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from helpers.models import tiny_model
from helpers.policies import LENGTHS, accumulate, gradient_boxes, pack_all, start_policy
from helpers.ranks import run_ranks
from megatron_grpo.policy import packed_params
from parallel import ParallelDims

DIMS = ParallelDims(context=2)
RECOMPUTED = (
    "model.megatron={recompute_granularity: full, recompute_method: uniform, "
    "recompute_num_layers: 1}"
)


def gradients_and_orders(
    rank: int, folder: Path, overrides: list[str]
) -> tuple[dict[str, Tensor], int]:
    """Gradients of a step, and how often the token order was computed for it."""
    policy, groups = start_policy(rank, folder, DIMS, *overrides)
    order = packed_params.context_order
    with mock.patch.object(packed_params, "context_order", wraps=order) as counted:
        accumulate(policy, groups, pack_all(LENGTHS, DIMS))
    boxes = gradient_boxes(policy)
    return {f"{name} {box}": values for name, box, values in boxes}, counted.call_count


def test_the_order_of_tokens_is_made_once_for_all_layers_of_a_microbatch(tmp_path):
    folder = tiny_model(tmp_path, "llama", num_hidden_layers=3)
    plain, recomputed = (
        run_ranks(2, gradients_and_orders, folder, overrides) for overrides in ([], [RECOMPUTED])
    )
    assert [count for _, count in plain + recomputed] == [len(LENGTHS)] * 4
    for (gradients, _), (again, _) in zip(plain, recomputed, strict=True):
        for name, values in gradients.items():
            assert torch.equal(again[name], values), name


def gradients_before_and_after(
    rank: int, folder: Path
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of two sequences, alone and after a sequence with as many tokens as both."""
    policy, groups = start_policy(rank, folder, ParallelDims())
    found = []
    for lengths in ([[(9, 7), (9, 7)]], [[(9, 23)]], [[(9, 7), (9, 7)]]):
        accumulate(policy, groups, pack_all(lengths, ParallelDims()))
        boxes = gradient_boxes(policy)
        found.append({f"{name} {box}": values.clone() for name, box, values in boxes})
    return found[0], found[2]


def test_a_sequence_begins_at_position_0_whatever_was_computed_before(tmp_path):
    folder = tiny_model(tmp_path, "llama", num_hidden_layers=2)
    [(before, after)] = run_ranks(1, gradients_before_and_after, folder)
    for name, values in before.items():
        assert torch.equal(after[name], values), name
