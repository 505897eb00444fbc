"""Whole pushes: trainer ranks and the workers of a chain of engines, each in its own process."""

import re
import resource
import threading
import time
from collections import UserDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from helpers.ranks.processes import Child, running
from parallel import Box, Layout, Sender, ShardMapping, plan_sends
from parallel.checksum import checksums
from parallel.views import as_whole
from parallel.weight_transfer import (
    ChannelError,
    TransferInitInfo,
    WeightReceiver,
    WeightSender,
    connect,
)
from parallel.weight_transfer.rendezvous import join, memory_domain, open_rendezvous

CPU = torch.device("cpu")
BUCKET = 5 * 16  # so that a channel has more buckets than buffers, and most are not quite full
TIMEOUT = timedelta(seconds=60)
SOON = 30
"""In seconds: less than the time-out, more than a busy machine needs."""
NUM_RANKS = NUM_WORKERS = 2
SHAPES = {
    "embedding": (37, 12),
    "norm": (11,),
    "columns": (13, 24),
    **{f"expert.{number}": (8, 6) for number in range(4)},
}


def whole_weights(seed):
    generator = torch.Generator().manual_seed(seed)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    weights["norm"] = weights["norm"].bfloat16().float()
    return weights


def part(name, start, size):
    """A box of a whole tensor, held as a local tensor of the same name."""
    return ShardMapping(name, Box.whole(size), name, Box(start, size))


def sender_of(rank):
    """Rows of the embedding, columns of `columns`, half of the experts; all ranks hold `norm`."""
    rows = (19, 18)[rank]
    pieces = [
        part("embedding", (19 * rank, 0), (rows, 12)),
        part("norm", (0,), (11,)),
        part("columns", (0, 12 * rank), (13, 12)),
        *(part(f"expert.{2 * rank + i}", (0, 0), (8, 6)) for i in range(2)),
    ]
    owners = {piece.local: range(rank, rank + 1) for piece in pieces}
    owners["norm"] = range(NUM_RANKS)
    layout = Layout({piece.local: piece.local_box.size for piece in pieces}, tuple(pieces))
    return Sender(rank, layout, owners)


def layout_of(worker):
    """Rows of the embedding, padded; rows of `columns`; half of each expert, in one stack."""
    pieces = [
        part("embedding", (20 * worker, 0), (20 - 3 * worker, 12)),
        part("norm", (0,), (11,)),
        part("columns", (6 * worker, 0), (6 + worker, 24)),
    ]
    for number in range(4):
        slot, half = Box((number, 0, 0), (1, 4, 6)), Box((4 * worker, 0), (4, 6))
        pieces.append(ShardMapping("experts", slot, f"expert.{number}", half, axes=(1, 2)))
    shapes = {"embedding": (20, 12), "norm": (11,), "columns": (6 + worker, 24)}
    zeros = (("embedding", Box((17, 0), (3, 12))),) if worker else ()
    return Layout(shapes | {"experts": (4, 4, 6)}, tuple(pieces), zeros)


LAYOUTS = [layout_of(worker) for worker in range(NUM_WORKERS)]
PARAMETERS = [layout.shapes for layout in LAYOUTS]
DTYPES = dict.fromkeys(PARAMETERS[0], torch.bfloat16) | {"norm": torch.float32}
"""Engines may keep some parameters in float32, whatever trainers have."""


def init_info_of(address, num_engines, network_only):
    return TransferInitInfo(
        address,
        BUCKET,
        num_engines,
        network_only,
        senders=[list(range(NUM_RANKS))] * NUM_WORKERS,
        zeros=[[(name, [*b.start], [*b.size]) for name, b in ly.zeros] for ly in LAYOUTS],
    )


def filled(layout, weights, dtypes):
    """The local tensors of a layout, float32 where `dtypes` names none; padding is 0."""
    tensors = {
        name: torch.zeros(shape, dtype=dtypes.get(name)) for name, shape in layout.shapes.items()
    }
    for piece in layout.pieces:
        target = as_whole(tensors[piece.local][piece.local_box.slices], piece.axes)
        target.copy_(weights[piece.tensor][piece.box.slices])
    return tensors


class MadeWhenAsked(UserDict):
    """Tensors in one reused buffer, like weights into which adapters are merged on demand."""

    memory = threading.local()  # channels read at the same time

    def __getitem__(self, name):
        value = super().__getitem__(name)
        if not hasattr(self.memory, "bytes"):
            self.memory.bytes = torch.empty(10_000, dtype=torch.uint8)
        made = self.memory.bytes[: value.nbytes].view(value.dtype).view(value.shape)
        return made.copy_(value)


def trainer_rank(pipe, init_info, rank):
    """Send the weights of each seed from the pipe until it fails; report over the pipe."""
    sender = sender_of(rank)
    sends = plan_sends(sender, LAYOUTS, BUCKET // 4)
    try:
        rendezvous = join(init_info.rendezvous, TIMEOUT)
        weight_sender = WeightSender(
            init_info, rendezvous, rank, sends, PARAMETERS, DTYPES, CPU, TIMEOUT
        )
        pipe.send("open")
        while True:
            weights = whole_weights(seed := pipe.recv())
            tensors = filled(sender.layout, weights, {"norm": torch.bfloat16})
            weight_sender.send_weights(tensors if seed % 2 else MadeWhenAsked(tensors))
            pipe.send(weight_sender.bytes_sent)
    except (ChannelError, KeyError) as error:
        pipe.send(f"{type(error).__name__}: {error}")
        pipe.recv()


def engine_worker(pipe, init_info, engine, worker, missing=None):
    """Receive the weights of each seed from the pipe until it fails; report over the pipe.

    As in engines, some parameters are inference tensors, and some are views of tensors that require
    gradients.
    """
    layout = LAYOUTS[worker]
    parameters = filled(layout, whole_weights(0), DTYPES)
    stack = torch.nn.Parameter(torch.stack([parameters["columns"]] * 2))
    with torch.no_grad():
        parameters["columns"] = stack[1]
    with torch.inference_mode():
        parameters["experts"] = parameters["experts"].clone()
    if missing:
        parameters[missing] = torch.zeros(3, dtype=torch.bfloat16)
    info = TransferInitInfo.from_json(init_info)
    try:
        receiver = WeightReceiver(info, engine, worker, parameters, CPU, TIMEOUT)
        pipe.send("open")
        while (seed := pipe.recv()) is not None:
            if seed == "replace":
                parameters["norm"] = torch.zeros(11)
                continue
            before = {name: value.data_ptr() for name, value in parameters.items()}
            sums = receiver.receive_weights(parameters)
            assert before == {name: value.data_ptr() for name, value in parameters.items()}
            expected = filled(layout, whole_weights(seed), DTYPES)
            views = {name: value[:] for name, value in parameters.items()}
            wrong = [name for name in expected if not torch.equal(expected[name], views[name])]
            wrong += [
                f"sum of {name}" for name, sum in checksums(views).items() if sums[name] != sum
            ]
            pipe.send((receiver.bytes_received, wrong))
    except (ChannelError, ValueError) as error:
        pipe.send(f"{type(error).__name__}: {error}")
        pipe.recv()


@dataclass
class Pushing:
    """The processes of pushes, with all channels open."""

    ranks: list[Child]
    workers: dict[tuple[int, int], Child]

    @property
    def all(self) -> list[Child]:
        return [*self.ranks, *self.workers.values()]

    def push(self, seed):
        """Push the weights of `seed`; returns the reports of the ranks and of the workers."""
        for child in self.all:
            child.say(seed)
        return [r.hear() for r in self.ranks], [w.hear() for w in self.workers.values()]


@contextmanager
def pushing_processes(num_engines, network_only=False):
    address, rendezvous = open_rendezvous("127.0.0.1")
    init_info = init_info_of(address, num_engines, network_only)
    plain_info = init_info.to_json()
    with ExitStack() as stack:
        start = stack.enter_context
        ranks = [start(running(trainer_rank, init_info, rank)) for rank in range(NUM_RANKS)]
        workers = {
            (engine, worker): start(running(engine_worker, plain_info, engine, worker))
            for engine in range(num_engines)
            for worker in range(NUM_WORKERS)
        }
        processes = Pushing(ranks, workers)
        assert [child.hear() for child in processes.all] == ["open"] * len(processes.all)
        yield processes
    del rendezvous


def num_bytes(layout):
    """Bytes of a worker's parameters, without padding."""
    return sum(
        piece.local_box.num_elements * DTYPES[piece.local].itemsize for piece in layout.pieces
    )


@pytest.mark.parametrize("network_only", [False, True], ids=["local", "network"])
def test_every_parameter_of_every_engine_arrives_bit_for_bit_in_push_after_push(network_only):
    sizes = [num_bytes(layout) for layout in LAYOUTS]
    with pushing_processes(3, network_only) as pushing:
        maps = [Path(f"/proc/{child.pid}/maps").read_text() for child in pushing.ranks]
        assert [text.count("memfd:weights") for text in maps] == [0 if network_only else 2] * 2
        for number in (1, 2, 3):
            if number == 2:
                for worker in pushing.workers.values():
                    worker.say("replace")
            sent, received = pushing.push(number)
            assert received == [(number * size, []) for size in sizes] * 3
            assert sum(sent) == number * sum(sizes)


def heard_within(seconds, child):
    start = time.monotonic()
    said = child.hear(seconds)
    assert time.monotonic() - start < seconds
    return said


def test_a_trainer_rank_killed_in_a_push_is_named_by_the_workers_and_the_rest_end():
    with pushing_processes(2) as pushing:
        others = [pushing.ranks[0], *pushing.workers.values()]
        for child in others:
            child.say(1)
        time.sleep(0.3)
        pushing.ranks[1].kill()
        lost = "has closed the channel or died"
        said = {key: heard_within(SOON, child) for key, child in pushing.workers.items()}
        assert said[0, 0] == said[0, 1] == f"ChannelError: trainer rank 1 {lost}"
        assert said[1, 0] == f"ChannelError: engine 0 worker 0 {lost}"
        # Rank 0 may have finished before rank 1 died.
        sent = heard_within(SOON, pushing.ranks[0])
        assert isinstance(sent, int) or "engine 0 worker" in sent


def test_a_worker_killed_in_a_push_is_named_by_its_sender_and_all_end():
    with pushing_processes(2) as pushing:
        for key, child in pushing.workers.items():
            if key != (1, 1):  # it takes nothing, so no process finishes
                child.say(1)
        for child in pushing.ranks:
            child.say(1)
        time.sleep(0.3)
        pushing.workers[1, 1].kill()
        lost = "has closed the channel or died"
        assert (
            heard_within(SOON, pushing.workers[0, 1]) == f"ChannelError: engine 1 worker 1 {lost}"
        )
        for child in pushing.ranks:
            assert heard_within(SOON, child) == f"ChannelError: engine 0 worker 1 {lost}"


def open_sender(sends, timeout=1.0, bucket_bytes=BUCKET):
    address, rendezvous = open_rendezvous("127.0.0.1")
    init_info = replace(init_info_of(address, 1, network_only=False), bucket_bytes=bucket_bytes)
    seconds = timedelta(seconds=timeout)
    return WeightSender(init_info, rendezvous, 0, sends, PARAMETERS, DTYPES, CPU, seconds)


def test_workers_that_do_not_come_are_named_after_the_time_out():
    late = r"no message from engine 0 worker 0, engine 0 worker 1 within"
    with pytest.raises(ChannelError, match=late):
        open_sender(plan_sends(sender_of(0), LAYOUTS, BUCKET // 4))


def send_matrix(init_info, rendezvous):
    """The sender of the matrix `w` to one worker."""
    matrix = Layout.of_whole_tensors({"w": (4, 4)})
    sends = plan_sends(Sender(0, matrix, {"w": range(1)}), [matrix], BUCKET // 4)
    shapes, dtypes = [matrix.shapes], {"w": torch.float32}
    return WeightSender(init_info, rendezvous, 0, sends, shapes, dtypes, CPU, TIMEOUT)


def open_all(engines, bucket_bytes=BUCKET):
    """Open a trainer rank that sends the matrix `w` and a worker of each engine concurrently.

    `engines` are the parameters of each engine. Returns each end, or the exception it raised.
    """
    address, rendezvous = open_rendezvous("127.0.0.1")
    init_info = TransferInitInfo(
        address, bucket_bytes, len(engines), False, senders=[[0]], zeros=[[]]
    )
    with ThreadPoolExecutor(1 + len(engines)) as pool:
        waiting = [
            pool.submit(send_matrix, init_info, rendezvous),
            *(
                pool.submit(WeightReceiver, init_info, engine, 0, parameters, CPU, TIMEOUT)
                for engine, parameters in enumerate(engines)
            ),
        ]
        return [future.exception(timeout=SOON) or future.result() for future in waiting]


MATRIX = {"w": torch.zeros(4, 4)}


def act_around_opening(monkeypatch, before_sender, after_receiver=lambda peer: None):
    """Call `before_sender` and `after_receiver` with the peer's name around each new end."""
    open_channel = connect.LocalChannel

    def acting(control, bucket_bytes, device, *, is_sender):
        if is_sender:
            before_sender(control.peer)
        channel = open_channel(control, bucket_bytes, device, is_sender=is_sender)
        if not is_sender:
            after_receiver(control.peer)
        return channel

    monkeypatch.setattr(connect, "LocalChannel", acting)


def test_all_channels_of_a_chain_of_engines_are_made_at_the_same_time(monkeypatch):
    """Each end waits until all have started: a chain opens as fast as one engine."""
    all_at_it = threading.Barrier(5, timeout=SOON / 2)
    act_around_opening(monkeypatch, lambda receiver: all_at_it.wait())
    ends = open_all([MATRIX] * 5)
    assert [type(end) for end in ends] == [WeightSender, *[WeightReceiver] * 5]
    for end in ends:
        end.close()


def test_a_worker_that_cannot_forward_closes_its_incoming_channel(monkeypatch):
    takes_from_rank = threading.Event()

    def fail(receiver):
        if receiver == "engine 1 worker 0":
            assert takes_from_rank.wait(SOON)
            raise OSError("too little memory")

    act_around_opening(
        monkeypatch, fail, lambda sender: sender == "trainer rank 0" and takes_from_rank.set()
    )
    sender, first, second = open_all([MATRIX] * 2)
    assert str(first) == "too little memory" and isinstance(second, ChannelError)
    if isinstance(sender, WeightSender):  # its channel was made before the other one failed
        sender.close()
    assert "memfd:weights" not in Path("/proc/self/maps").read_text()


def test_the_refusal_of_a_worker_reaches_all_earlier_ones_at_once():
    sender, first, second = open_all([MATRIX, MATRIX | {"bias": torch.zeros(3)}])
    assert isinstance(second, ValueError)
    for failure in (sender, first):
        assert isinstance(failure, ChannelError)
        assert re.search(r"engine 1 worker 0: .*bias: 3 of 3 elements", str(failure), re.S)


def test_a_sender_fails_at_once_when_its_receiver_cannot_come():
    """The rank already listens when another rank that never came gives up."""
    address, rendezvous = open_rendezvous("127.0.0.1")
    init_info = TransferInitInfo(address, BUCKET, 1, False, senders=[[0]], zeros=[[]])
    join(address, TIMEOUT).publish("memory/0/0", memory_domain(CPU))
    with ThreadPoolExecutor() as pool:
        opening = pool.submit(send_matrix, init_info, rendezvous)
        join(address, TIMEOUT).await_texts({"channel/0/0/0": "the rank"}, TIMEOUT)
        join(init_info.rendezvous, TIMEOUT).publish_failure("trainer rank 1 gave up")
        with pytest.raises(ChannelError, match="trainer rank 1 gave up"):
            opening.result(timeout=SOON)


@contextmanager
def little_shared_memory():
    """In the block, this process cannot create shared memory (or a file) larger than 64 KiB."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_sender_without_memory_for_its_buffers_leaves_nobody_waiting():
    with little_shared_memory():
        failures = open_all([MATRIX] * 2, bucket_bytes=1 << 16)
    assert any("File too large" in str(failure) for failure in failures)
    assert all(isinstance(failure, OSError) for failure in failures)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_checksums_of_sender_and_worker_agree_and_padding_is_zero(dtype):
    """Weights are sent as `dtype`; the parameter's last row is padding."""
    address, rendezvous = open_rendezvous("127.0.0.1")
    zeros = [[("w", [5, 0], [1, 7])]]
    init_info = TransferInitInfo(address, 256, 1, False, senders=[[0]], zeros=zeros)
    whole, held = Box.whole((5, 7)), torch.zeros(6, 7, dtype=dtype)
    sender = Sender(0, Layout.of_whole_tensors({"w": (5, 7)}), {"w": range(1)})
    worker = Layout({"w": (6, 7)}, (ShardMapping("w", whole, "w", whole),))
    sends = plan_sends(sender, [worker], max_elements=14)
    with ThreadPoolExecutor() as pool:
        arguments = (init_info, rendezvous, 0, sends, [worker.shapes], {"w": dtype}, CPU, TIMEOUT)
        opening = pool.submit(WeightSender, *arguments)
        receiver = WeightReceiver(init_info, 0, 0, {"w": held}, CPU, TIMEOUT)
        sender = opening.result(timeout=SOON)

        def push():
            sending = pool.submit(sender.send_weights, {"w": torch.randn(5, 7)})
            received = receiver.receive_weights({"w": held})
            return sending.result(timeout=SOON)[0], received

        sent, received = push()
        assert sent == received == checksums({"w": held})
        held.fill_(float("nan"))  # as memory may hold anything when an engine has slept
        sent, received = push()
        assert sent == received == checksums({"w": held})
        assert held[5].tolist() == [0] * 7
        sender.close()
        receiver.close()


def test_a_rank_that_sends_nothing_does_not_wait():
    address, rendezvous = open_rendezvous("127.0.0.1")
    init_info = TransferInitInfo(address, BUCKET, 1, False, senders=[[1]], zeros=[[]])
    sender = WeightSender(init_info, rendezvous, 0, {}, [], {}, CPU)
    assert sender.send_weights({}) == {}
    assert sender.bytes_sent == 0
    sender.close()
    with pytest.raises(ChannelError, match="the channels were closed"):
        sender.send_weights({})


def test_a_copy_larger_than_a_bucket_is_refused_before_any_message():
    with pytest.raises(ValueError, match="456 bytes in one piece exceed a bucket of 80"):
        open_sender(plan_sends(sender_of(0), LAYOUTS, 1000))


def test_trainer_ranks_that_do_not_come_are_named_after_the_time_out():
    address, rendezvous = open_rendezvous("127.0.0.1")
    init_info = init_info_of(address, 1, network_only=False)
    late = r"no message from trainer rank 0, trainer rank 1 within 1 s"
    with pytest.raises(ChannelError, match=late):
        WeightReceiver(init_info, 0, 0, {}, CPU, timedelta(seconds=1))
    del rendezvous
