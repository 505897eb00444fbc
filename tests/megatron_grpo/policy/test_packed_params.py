import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from helpers.models.tiny import tiny_model
from helpers.oracle.policies import LENGTHS, accumulate, gradient_boxes, pack_all, start_policy
from helpers.ranks.processes import run_ranks
from megatron_grpo.policy import packed_params
from parallel import ParallelDims
from parallel.dims import Coordinates

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
    """Gradients of a step, and how often the token order was computed for it."""
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


def test_attention_gets_few_different_longest_lengths():
    """Transformer Engine and cuDNN prepare anew for each length."""
    for size, expected in ((1, {512, 1024}), (3, {1536})):
        dims, coordinates = (
            ParallelDims(context=size),
            Coordinates(tensor=0, context=0, data=0, pipeline=0),
        )
        batches = pack_all([[(3, 9)], [(7, 400), (2, 2)], [(7, 600)]], dims)
        params = [
            packed_params.packed_params(batch, batch.on_rank(dims, coordinates).part.local, 0, size)
            for batch in batches
        ]
        assert {each.max_seqlen_q for each in params} == expected
        assert {each.max_seqlen_kv for each in params} == expected
        assert {each.pad_between_seqs for each in params} == {False}  # else layers look every time
        # If there were as many rows as tokens, Megatron would take each row for a token's own.
        assert [each.rope_length for each in params] == [batch.max_seqlen for batch in batches]


HEAD_DIM = 16


def rows_of_tables(rank: int, folder: Path, dims: ParallelDims) -> list[int]:
    """Rows of each RoPE table that a step on microbatches of several lengths leaves behind."""
    policy, groups = start_policy(rank, folder, dims)
    accumulate(policy, groups, pack_all([[(3, 9)], [(7, 41)], [(5, 8)], [(4, 20)]], dims))
    tensors = [found for found in gc.get_objects() if isinstance(found, Tensor)]
    tables = [found for found in tensors if found.shape[1:] == (1, 1, HEAD_DIM)]
    return [len(table) for table in tables]


def test_one_rope_table_is_kept_by_all_model_chunks_whatever_lengths_there_are(tmp_path):
    folder = tiny_model(tmp_path, "llama", num_hidden_layers=4)
    dims = ParallelDims(pipeline=2, virtual_pipeline=2)
    assert run_ranks(2, rows_of_tables, folder, dims) == [[48], [48]]


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
