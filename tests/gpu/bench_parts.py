"""A push between two processes on one GPU, and log-probabilities alone; seconds on one card.

    PYTHONPATH=.:tests python tests/gpu/bench_parts.py [push] [logprobs]

push: 2.1 GB of bfloat16 matrices of 4096 x 4096 go five times through CUDA IPC from a sender to a
receiver, with checksums at both ends. logprobs: forward and backward of the log-probabilities of
4,096 tokens as on one of 8 tensor ranks of Llama 70B (8,192 wide, 16,032 words), by logit tiles and
by torch's linear layer with cross_entropy; medians of ten between CUDA events, and peak memory.
"""

import argparse
import time
from collections.abc import Callable
from datetime import timedelta
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from helpers.ranks.processes import running
from parallel import Box, Copy
from parallel.logprobs import chosen_logprobs
from parallel.rank_part import Predictions, prediction_targets
from parallel.weight_transfer import TransferInitInfo, WeightReceiver, WeightSender
from parallel.weight_transfer.rendezvous import join, open_rendezvous

SIDE, NUM_MATRICES, NUM_PUSHES = 4096, 64, 5
BUCKET = 256 << 20
TIMEOUT = timedelta(seconds=60)
NUM_TOKENS, HIDDEN_SIZE, VOCAB_SIZE = 4096, 8192, 16032
NAMES = [f"weight_{number}" for number in range(NUM_MATRICES)]


def main() -> None:
    """Print a line for each push, and for each way to compute log-probabilities."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=["push", "logprobs"])
    parts = parser.parse_args().parts or ["push", "logprobs"]
    if "push" in parts:
        pushes()
    if "logprobs" in parts:
        logprobs()


def send(pipe: Any, init_info: TransferInitInfo) -> None:
    """Push, and report the seconds of each push."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    whole = Box((0, 0), (SIDE, SIDE))
    sender = WeightSender(
        init_info,
        join(init_info.rendezvous, TIMEOUT),
        0,
        {0: [Copy(name, box, name, box) for name in NAMES for box in whole.cut(BUCKET // 2)]},
        [dict.fromkeys(NAMES, (SIDE, SIDE))],
        dict.fromkeys(NAMES, torch.bfloat16),
        device,
        TIMEOUT,
    )
    weights = {name: torch.randn(SIDE, SIDE, dtype=torch.bfloat16, device=device) for name in NAMES}
    for _ in range(NUM_PUSHES):
        start = time.perf_counter()
        sender.send_weights(weights)
        pipe.send(time.perf_counter() - start)
    pipe.recv()


def receive(pipe: Any, init_info: TransferInitInfo) -> None:
    """Receive every push, and report the seconds of each."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    parameters = {
        name: torch.zeros(SIDE, SIDE, dtype=torch.bfloat16, device=device) for name in NAMES
    }
    receiver = WeightReceiver(init_info, 0, 0, parameters, device, TIMEOUT)
    for _ in range(NUM_PUSHES):
        start = time.perf_counter()
        receiver.receive_weights(parameters)
        torch.cuda.synchronize()
        pipe.send(time.perf_counter() - start)
    pipe.recv()


def pushes() -> None:
    """Print the seconds and rates of pushes."""
    address, store = open_rendezvous("127.0.0.1")
    init_info = TransferInitInfo(address, BUCKET, 1, False, senders=[[0]], zeros=[[]])
    gigabytes = NUM_MATRICES * SIDE * SIDE * 2 / 1e9
    with running(send, init_info) as sender, running(receive, init_info) as receiver:
        for number in range(1, NUM_PUSHES + 1):
            seconds = max(end.hear(120) for end in (sender, receiver))
            rate = gigabytes / seconds
            print(f"push {number}: {gigabytes:.1f} GB in {seconds:.3f} s, {rate:.1f} GB/s")
    del store


def logprobs() -> None:
    """Print milliseconds and memory of each way."""
    generator = torch.Generator("cuda").manual_seed(0)
    hidden, weight = (
        torch.randn(rows, HIDDEN_SIZE, generator=generator, device="cuda")
        .mul(HIDDEN_SIZE**-0.5)
        .bfloat16()
        .requires_grad_()
        for rows in (NUM_TOKENS, VOCAB_SIZE)
    )
    tokens = torch.randint(VOCAB_SIZE, (NUM_TOKENS,), generator=generator, device="cuda")
    targets = prediction_targets(torch.tensor([0, NUM_TOKENS]), torch.arange(NUM_TOKENS))
    predictions = Predictions.of(targets, torch.ones(NUM_TOKENS, dtype=torch.bool)).to("cuda")

    def tiles() -> Tensor:
        chosen = chosen_logprobs(
            hidden,
            weight,
            tokens,
            predictions,
            temperature=1.0,
            vocab_size=VOCAB_SIZE,
            tensor_group=None,
        )
        return chosen.logprobs.sum()

    def bfloat16_logits() -> Tensor:
        return -cross_entropy(linear(hidden[:-1], weight), tokens[1:], reduction="sum")

    def float32_logits() -> Tensor:
        return -cross_entropy(linear(hidden[:-1], weight).float(), tokens[1:], reduction="sum")

    for function in (tiles, bfloat16_logits, float32_logits):

        def both(function: Callable[[], Tensor] = function) -> tuple[Tensor, ...]:
            return torch.autograd.grad(function(), (hidden, weight))

        forward, whole = milliseconds(function), milliseconds(both)
        name = function.__name__
        print(f"{name}: forward {forward:.2f} ms, both {whole:.2f} ms, {peak(both):.2f} GiB")


def milliseconds(work: Callable[[], object]) -> float:
    """Median of ten calls, after three that warm up."""
    taken = []
    for _ in range(13):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end))
    return median(taken[3:])


def peak(work: Callable[[], object]) -> float:
    """Peak GiB of `work` above the memory in use before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


if __name__ == "__main__":
    main()
