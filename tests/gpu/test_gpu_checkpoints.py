"""What a save copies from a GPU to host memory."""

import pytest
import torch

from megatron_grpo.checkpoints.shard_file import HostMemory

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
