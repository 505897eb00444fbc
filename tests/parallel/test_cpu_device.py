import pytest
import torch
import torch.distributed as dist

from helpers.ranks import run_ranks
from parallel.cpu_device import setup_device

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
        "event": torch.cuda.Stream().record_event().synchronize(),
        "same stream": torch.cuda.Stream() == torch.cuda.current_stream(),
        "waited": torch.cuda.Stream(device="cuda").wait_stream(torch.cuda.current_stream()),
        "optional": isinstance(None, torch.cuda.Stream | None),
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
        "event": None,
        "same stream": True,
        "waited": None,
        "optional": True,
        "num_modes": 1,
        "cuda": False,
    }


def unequal_collectives(rank: int) -> dict[str, list[float]]:
    """Collectives in which rank r has r + 1 rows."""
    setup_device(rank)
    size, group = dist.get_world_size(), dist.group.WORLD
    lengths = list(range(1, size + 1))
    own = torch.full((rank + 1, 2), float(rank))

    gathered = torch.empty(sum(lengths), 2)
    dist.all_gather(list(gathered.split(lengths)), own, group=group)

    summed = torch.empty(rank + 1, 2)
    whole = torch.arange(float(sum(lengths)))[:, None].expand(-1, 2) * (rank + 1)
    dist.reduce_scatter(summed, list(whole.split(lengths)), group=group)

    received = torch.empty(size * (rank + 1), 2)
    dist.all_to_all_single(
        received,
        torch.full((sum(lengths), 2), float(rank)),
        output_split_sizes=torch.tensor([rank + 1] * size),  # a tensor, as in Megatron's dispatcher
        input_split_sizes=torch.tensor(lengths),
        group=group,
    )
    results = {"all_gather": gathered, "reduce_scatter": summed, "all_to_all_single": received}
    return {name: result.T.tolist() for name, result in results.items()}


def test_gloo_takes_unequal_lengths_as_nccl_does():
    for rank, results in enumerate(run_ranks(3, unequal_collectives)):
        rows = [[0, 1, 1, 2, 2, 2]] * 2
        assert results["all_gather"] == rows
        mine = {0: [0], 1: [1, 2], 2: [3, 4, 5]}[rank]
        assert results["reduce_scatter"] == [[row * (1 + 2 + 3) for row in mine]] * 2
        senders = [sender for sender in range(3) for _ in range(rank + 1)]
        assert results["all_to_all_single"] == [senders] * 2


def test_importing_changes_nothing():
    assert torch.zeros(1).type() == "torch.FloatTensor"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")
