"""What a save copies from a GPU to host memory."""

import pytest
import torch

from megatron_grpo.checkpoints.shard_file import HostMemory
from megatron_grpo.checkpoints.state import StatePart, first_not_finite
from parallel import Box

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


def test_the_copies_are_right_while_the_memory_for_them_grows():
    memory = HostMemory()
    for size in (10, 100_000, 1_000):
        tensors = [torch.randn(size, device="cuda") for _ in range(3)]
        copies = [torch.frombuffer(copy, dtype=torch.float32) for copy in memory.copy(tensors)]
        for copy, tensor in zip(copies, tensors, strict=True):
            assert copy.is_pinned()
            assert torch.equal(copy, tensor.cpu())


def test_what_is_not_finite_is_found_where_some_of_the_state_is_on_the_host():
    def part(key: str, value: float, device: str) -> StatePart:
        values = torch.tensor([1.0, value], device=device)
        return StatePart(key, (2,), Box((0,), (2,)), values, is_replica=False, is_padded=False)

    fine = [part("weights", 2.0, "cuda"), part("moments", 3.0, "cpu")]
    assert first_not_finite(fine) is None
    for device in ("cuda", "cpu"):
        assert first_not_finite([*fine, part("spoilt", torch.nan, device)]) == "spoilt"
