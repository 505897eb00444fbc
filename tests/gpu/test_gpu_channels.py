"""Pushes between processes with GPUs: CUDA IPC on one GPU, NCCL between two."""

import ctypes
import time
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch

from helpers.ranks.processes import running
from parallel import Box, Copy
from parallel.checksum import whole_checksum
from parallel.weight_transfer import ChannelError, TransferInitInfo, WeightReceiver, WeightSender
from parallel.weight_transfer.local_channels import BLOCK_BYTES, CudaMemory, call_driver
from parallel.weight_transfer.rendezvous import join, open_rendezvous

BUCKET = 1 << 20
SHAPE = (1000, 4096)
TIMEOUT = timedelta(seconds=60)
NUM_PUSHES = 3


def weights(seed, device):
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)).to(device)


def send(pipe, init_info, gpu, num_pushes):
    """Send float32 weights as bfloat16, one group of columns after another, then hang."""
    device = torch.device("cuda", gpu)
    torch.cuda.set_device(device)
    boxes = [
        part
        for start in range(0, SHAPE[1], 512)
        for part in Box((0, start), (SHAPE[0], 512)).cut(BUCKET // 2)
    ]
    copies = {0: [Copy("source", box, "weight", box) for box in boxes]}
    store = join(init_info.rendezvous, TIMEOUT)
    sender = WeightSender(
        init_info,
        store,
        0,
        copies,
        [{"weight": SHAPE}],
        {"weight": torch.bfloat16},
        device,
        TIMEOUT,
    )
    try:
        for seed in range(num_pushes):
            sender.send_weights({"source": weights(seed, device)})
            pipe.send(sender.bytes_sent)
    except ChannelError as error:
        pipe.send(str(error))
    pipe.recv()


def receive(pipe, init_info, gpu, num_pushes):
    """Receive and check every push; then hang."""
    device = torch.device("cuda", gpu)
    torch.cuda.set_device(device)
    parameter = torch.zeros(SHAPE, dtype=torch.bfloat16, device=device)
    receiver = WeightReceiver(init_info, 0, 0, {"weight": parameter}, device, TIMEOUT)
    try:
        for seed in range(num_pushes):
            sums = receiver.receive_weights({"weight": parameter})
            expected = weights(seed, device).bfloat16()
            is_summed = sums == {"weight": int(whole_checksum(expected.cpu()))}
            pipe.send(is_summed and torch.equal(parameter, expected))
    except ChannelError as error:
        pipe.send(str(error))
    pipe.recv()


@contextmanager
def channel(gpus, pushes):
    """A sending and a receiving process on these GPUs."""
    if torch.cuda.device_count() <= max(gpus):
        pytest.skip(f"needs {max(gpus) + 1} GPUs")
    address, store = open_rendezvous("127.0.0.1")
    init_info = TransferInitInfo(address, BUCKET, 1, False, senders=[[0]], zeros=[[]])
    with (
        running(send, init_info, gpus[0], pushes[0]) as sender,
        running(receive, init_info, gpus[1], pushes[1]) as receiver,
    ):
        yield sender, receiver
    del store


@pytest.fixture(params=[(0, 0), (0, 1)], ids=["one GPU", "NCCL"])
def gpus(request):
    return request.param


def test_weights_arrive_bit_for_bit_in_push_after_push(gpus):
    with channel(gpus, (NUM_PUSHES, NUM_PUSHES)) as (sender, receiver):
        for number in range(1, NUM_PUSHES + 1):
            assert receiver.hear(120) is True
            assert sender.hear(120) == number * 2 * SHAPE[0] * SHAPE[1]


@pytest.mark.parametrize(
    ("pushes", "killed", "name"),
    [((1, 2), 0, "trainer rank 0"), ((2, 1), 1, "engine 0 worker 0")],
    ids=["sender", "receiver"],
)
def test_an_end_that_is_killed_is_named_at_once(gpus, pushes, killed, name):
    with channel(gpus, pushes) as ends:
        assert ends[1].hear(120) is True
        ends[0].hear(120)
        start = time.monotonic()
        ends[killed].kill()
        assert ends[1 - killed].hear(30) == f"{name} has closed the channel or died"
        assert time.monotonic() - start < 30


def test_shared_memory_takes_whole_blocks_of_the_driver():
    """CUDA IPC shares whole blocks: the other process would also see the rest of a block."""
    device = torch.device("cuda", 0)
    memory = CudaMemory.allocate(BLOCK_BYTES + 1, device)
    address, size = ctypes.c_uint64(memory.tensor.data_ptr()), ctypes.c_size_t()
    found = ctypes.byref(ctypes.c_uint64()), ctypes.byref(size)
    call_driver(device, "cuMemGetAddressRange_v2", *found, address)
    assert (memory.tensor.numel(), size.value) == (BLOCK_BYTES + 1, 2 * BLOCK_BYTES)
    memory.close()
