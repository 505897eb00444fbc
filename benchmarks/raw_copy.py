"""A push's bytes over its channels and in its buckets, but between plain tensors."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from helpers.engines.vllm_workers import WorkerClient, WorkerEngines, WorkerProcess
from megatron_grpo.engines.client import meanwhile
from megatron_grpo.weight_sync import WeightSync
from megatron_grpo.weight_transports import WeightChannels
from parallel.weight_transfer.channels import Channel
from parallel.weight_transfer.streams import InStream, OutStream


def plain_bytes(parameters: Mapping[str, Tensor]) -> Tensor:
    """A tensor of the parameters' bytes plus 1 MiB for gaps between boxes; its pages are mapped."""
    num_bytes = sum(value.nbytes for value in parameters.values())
    return torch.ones(num_bytes + (1 << 20), dtype=torch.uint8)


def push_raw(sync: WeightSync, rank: int, plain: Tensor, engines: WorkerEngines) -> None:
    """Send a push's number of bytes from `plain`, over the channels of an earlier push."""
    assert isinstance(sync._transport, WeightChannels)
    sender = sync._transport._sender
    assert sender is not None
    streams = [*sender._streams.values()]
    jobs = [
        partial(_send, stream.channel, buckets)
        for stream, buckets in zip(streams, _buckets(streams, plain), strict=True)
    ]
    source = WorkerClient(engines) if rank == 0 else None
    with meanwhile((lambda _: source.workers.call(_receive_all)) if source else None):
        sender._channels.run_all(jobs)


def _receive_all(process: WorkerProcess) -> None:
    receiver = process.worker.push_worker._receiver
    streams = receiver._streams
    jobs = [
        partial(_receive, stream.channel, buckets)
        for stream, buckets in zip(streams, _buckets(streams, process.plain), strict=True)
    ]
    receiver._channels.run_all(jobs)


def _buckets(streams: Sequence[OutStream | InStream], plain: Tensor) -> Iterator[Sequence[Tensor]]:
    """For each stream, consecutive parts of `plain` of the sizes of the stream's buckets."""
    start = 0
    for stream in streams:
        sizes = [bucket.num_bytes for bucket in stream.packing.buckets]
        yield plain[start : start + sum(sizes)].split(sizes)
        start += sum(sizes)


def _send(channel: Channel, buckets: Sequence[Tensor]) -> None:
    for bucket in buckets:
        channel.next_buffer()[: len(bucket)].copy_(bucket)
        channel.send_bucket(len(bucket))
    channel.flush()


def _receive(channel: Channel, buckets: Sequence[Tensor]) -> None:
    arrivals = channel.receive_buckets([len(bucket) for bucket in buckets])
    for bucket, buffer in zip(buckets, arrivals, strict=True):
        bucket.copy_(buffer)
