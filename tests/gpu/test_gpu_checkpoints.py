"""Copies from a GPU to host memory for a save."""

import pytest
import torch

from megatron_grpo.checkpoints.shard_file import HostMemory
from megatron_grpo.policy.export import check_finite


def test_copies_are_right_while_their_memory_grows():
    memory = HostMemory()
    for size in (10, 100_000, 1_000):
        tensors = [torch.randn(size, device="cuda") for _ in range(3)]
        copies = [torch.frombuffer(copy, dtype=torch.float32) for copy in memory.copy(tensors)]
        for copy, tensor in zip(copies, tensors, strict=True):
            assert copy.is_pinned()
            assert torch.equal(copy, tensor.cpu())


def test_state_that_lives_on_the_host_is_not_copied():
    weights, moments = torch.randn(10, device="cuda"), torch.randn(10)
    copies = HostMemory(borrows=True).copy([weights, moments])
    of_weights, of_moments = (torch.frombuffer(copy, dtype=torch.float32) for copy in copies)
    assert of_weights.is_pinned() and torch.equal(of_weights, weights.cpu())
    assert of_moments.data_ptr() == moments.data_ptr()


def test_values_that_are_not_finite_are_found_with_state_on_the_host():
    def values(value: float, device: str) -> torch.Tensor:
        return torch.tensor([1.0, value], device=device)

    fine = [("weights", values(2.0, "cuda")), ("moments", values(3.0, "cpu"))]
    check_finite(fine, "saved")
    for device in ("cuda", "cpu"):
        with pytest.raises(FloatingPointError, match=r"^spoilt is not finite"):
            check_finite([*fine, ("spoilt", values(torch.nan, device))], "saved")
