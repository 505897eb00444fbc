import pytest
import torch

from distributed import run_ranks
from parallel.device import setup_device

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU runtime is never active")


def cuda_requests(rank: int) -> dict[str, object]:
    device = setup_device(rank)
    setup_device(rank)
    tracker_state = torch.cuda.get_rng_state()
    torch.cuda.manual_seed(3)
    drawn = torch.rand(1, device="cuda").item()
    torch.cuda.manual_seed(3)
    return {
        "device": device.type,
        "made": torch.zeros(2, device="cuda").device.type,
        "made by index": torch.zeros(2, device=torch.device("cuda", 0)).device.type,
        "copied": torch.zeros(2).cuda().device.type,
        "left alone": torch.zeros(2, device="meta").device.type,
        "current": torch.empty(1, device=torch.cuda.current_device()).device.type,
        "float type": torch.zeros(1).type(),
        "bfloat16 type": torch.zeros(1).bfloat16().type(),
        "converted": torch.zeros(1).type(torch.int64).dtype,
        "state": tracker_state.dtype,
        "repeatable": drawn == torch.rand(1).item(),
        "num_modes": len(torch.overrides._get_current_function_mode_stack()),
        "cuda": torch.cuda.is_available(),
    }


def test_cuda_requests_are_answered_by_the_cpu():
    (answers,) = run_ranks(1, cuda_requests)
    assert answers == {
        "device": "cpu",
        "made": "cpu",
        "made by index": "cpu",
        "copied": "cpu",
        "left alone": "meta",
        "current": "cpu",
        "float type": "torch.cuda.FloatTensor",
        "bfloat16 type": "torch.cuda.BFloat16Tensor",
        "converted": torch.int64,
        "state": torch.uint8,
        "repeatable": True,
        "num_modes": 1,
        "cuda": False,
    }


def test_importing_changes_nothing():
    assert torch.zeros(1).type() == "torch.FloatTensor"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")
