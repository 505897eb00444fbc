from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from distributed import run_ranks
from megatron_grpo.policy import packed_params
from models import tiny_model
from parallel import ParallelDims
from policies import LENGTHS, accumulate, gradient_boxes, pack_all, start_policy

DIMS = ParallelDims(context=2)
RECOMPUTED = (
    "model.megatron={recompute_granularity: full, recompute_method: uniform, "
    "recompute_num_layers: 1}"
)


def counted(function: Callable[..., object], calls: list[object]) -> Callable[..., object]:
    def call(*args: object) -> object:
        calls.append(args)
        return function(*args)

    return call


def gradients_and_orders(
    rank: int, folder: Path, overrides: list[str]
) -> tuple[dict[str, Tensor], int]:
    """Gradients of a step, and how often the order of tokens was made for it."""
    policy, groups = start_policy(rank, folder, DIMS, *overrides)
    orders: list[object] = []
    with pytest.MonkeyPatch.context() as patch:
        counting = counted(packed_params.context_order, orders)
        patch.setattr(packed_params, "context_order", counting)
        accumulate(policy, groups, pack_all(LENGTHS, DIMS))
    boxes = gradient_boxes(policy)
    return {f"{name} {box}": values for name, box, values in boxes}, len(orders)


def test_the_order_of_tokens_is_made_once_for_all_layers_of_a_microbatch(tmp_path):
    folder = tiny_model(tmp_path, "llama", num_hidden_layers=3)
    plain, recomputed = (
        run_ranks(2, gradients_and_orders, folder, overrides) for overrides in ([], [RECOMPUTED])
    )
    assert [count for _, count in plain + recomputed] == [len(LENGTHS)] * 4
    for (gradients, _), (again, _) in zip(plain, recomputed, strict=True):
        for name, values in gradients.items():
            assert torch.equal(again[name], values), name
