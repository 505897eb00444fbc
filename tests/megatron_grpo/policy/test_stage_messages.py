from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from helpers.models.tiny import tiny_model
from helpers.oracle.policies import accumulate, pack_all, start_policy
from helpers.ranks.processes import run_ranks
from megatron_grpo.policy.forward import StageMessages, received_order
from parallel import ParallelDims

LENGTHS = [[(5, 32)], [(7, 41)], [(9, 7), (9, 7)], [(3, 3)], [], [(2, 60)]]


def test_a_stage_receives_microbatches_in_turn():
    dims = ParallelDims(pipeline=2)
    assert received_order(3, dims, is_end=False) == [0, 1, 2]
    assert received_order(3, dims, is_end=True) == []


def test_the_chunks_of_a_stage_take_turns():
    dims = ParallelDims(pipeline=2, virtual_pipeline=2)
    assert received_order(4, dims, is_end=False) == [0, 1, 0, 1, 2, 3, 2, 3]
    assert received_order(4, dims, is_end=True) == [0, 1, 2, 3]


def messages_of_a_pass(rank: int, folder: Path, dims: ParallelDims) -> tuple[set[str], int]:
    """Types of the tensors that a rank sends or receives, and shapes that were left over."""
    policy, groups = start_policy(rank, folder, dims)
    types, made = set(), []

    def noted(call):
        def note(tensor, *args, **kwargs):
            types.add(str(tensor.dtype))
            return call(tensor, *args, **kwargs)

        return note

    class Noted(StageMessages):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    def batched(messages):
        types.update(str(message.tensor.dtype) for message in messages)
        return batch(messages)

    batch = dist.batch_isend_irecv
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", batched)
        for name in ("isend", "irecv") if dims.virtual_pipeline > 1 else ():
            patch.setattr(dist, name, noted(getattr(dist, name)))
        patch.setattr("megatron_grpo.policy.forward.StageMessages", Noted)
        accumulate(policy, groups, pack_all(LENGTHS, dims))
    [messages] = made
    return types, len(messages._from_previous) + len(messages._from_next)


@pytest.mark.long
@pytest.mark.parametrize(
    "dims",
    [
        ParallelDims(pipeline=2),
        ParallelDims(pipeline=3),
        ParallelDims(pipeline=2, virtual_pipeline=2),
        ParallelDims(pipeline=3, virtual_pipeline=2),
        ParallelDims(tensor=2, pipeline=2),
    ],
    ids=lambda dims: f"{dims} vpp({dims.virtual_pipeline})",
)
def test_no_message_carries_a_shape(tmp_path, dims):
    """test_train_step.py compares the numbers."""
    folder = tiny_model(tmp_path, "llama", num_hidden_layers=6)
    for types, num_left in run_ranks(dims.world_size, messages_of_a_pass, folder, dims):
        assert types == {str(torch.float32)}
        assert num_left == 0
