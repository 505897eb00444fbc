import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from helpers.ranks.processes import run_ranks
from parallel import cpu_device
from parallel.cpu_device import cores_at, run_near, setup_device

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU runtime is never active")


def ask_for_cuda(rank: int) -> None:
    assert setup_device(rank).type == setup_device(rank).type == "cpu"
    assert torch.zeros(2, device="cuda").device.type == "cpu"
    assert torch.zeros(2, device=torch.device("cuda", 0)).cuda().device.type == "cpu"
    assert torch.zeros(2, device="meta").device.type == "meta"
    assert torch.empty(1, device=torch.cuda.current_device()).device.type == "cpu"
    assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
    assert torch.zeros(1).bfloat16().type() == "torch.cuda.BFloat16Tensor"
    assert torch.zeros(1).type(torch.int64).dtype == torch.int64
    assert torch.cuda.get_rng_state().dtype == torch.uint8
    torch.cuda.manual_seed(3)
    drawn = torch.rand(1, device="cuda")
    torch.cuda.manual_seed(3)
    assert drawn == torch.rand(1)
    torch.cuda.Stream().record_event().synchronize()
    torch.cuda.Stream(device="cuda").wait_stream(torch.cuda.current_stream())
    assert torch.cuda.Stream() == torch.cuda.current_stream()
    assert not isinstance(1, torch.cuda.Stream | None)
    assert len(torch.overrides._get_current_function_mode_stack()) == 1
    assert not torch.cuda.is_available()


def test_cuda_requests_are_answered_by_the_cpu():
    run_ranks(1, ask_for_cuda)


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


@pytest.mark.parametrize(
    ("text", "expected"), [("0-3,8-11\n", {0, 1, 2, 3, 8, 9, 10, 11}), ("5\n", {5}), ("\n", set())]
)
def test_cores_at_reads_the_kernels_list_of_a_device(tmp_path, text, expected):
    (tmp_path / "0000:1b:00.0").mkdir()
    (tmp_path / "0000:1b:00.0" / "local_cpulist").write_text(text)
    assert cores_at("0000:1b:00.0", tmp_path) == expected
    assert cores_at("0000:00:00.0", tmp_path) == set()


def test_a_rank_runs_on_its_cores_near_its_gpu(monkeypatch):
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    before = os.sched_getaffinity(0)
    one = min(before)
    found = {"0000:1b:00.0": {one, 4095}}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(cpu_device, "cores_at", found.__getitem__)
    try:
        run_near(torch.device("cuda"))
        assert os.sched_getaffinity(0) == {one}
        os.sched_setaffinity(0, before)
        found["0000:1b:00.0"] = {4095}  # a core that the job may not use
        run_near(torch.device("cuda"))
        assert os.sched_getaffinity(0) == before
    finally:
        os.sched_setaffinity(0, before)
