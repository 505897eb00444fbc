"""Bytes that each process sends and receives in one push of weights, from a config alone.

    PYTHONPATH=. python benchmarks/push_table.py CONFIG [KEY.SUB=VALUE ...]

Reads only CONFIG and the model's config.json. ValueError where trainer or engine cannot split the
model, or where `rollout.update_weights_bucket_megabytes` is too small for the buffers.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from checkpoint_convert import ModelShape, check_divisible
from checkpoint_convert.megatron import first_senders
from megatron_grpo.config.config import Config
from megatron_grpo.config.file import load_config
from megatron_grpo.config.trained_shape import trained_shape
from megatron_grpo.engine_weights.layouts import (
    quantized_engine,
    shard_bytes,
    worker_layouts,
    worker_shards,
)
from megatron_grpo.engines.vllm.args import check_adapters
from megatron_grpo.planning.card import ITEMSIZE, worker_itemsizes
from megatron_grpo.planning.command import table
from megatron_grpo.policy.lora_targets import check_lora, first_adapter_senders
from parallel import Layout, Sender, all_shares, senders_by_worker
from parallel.reshard import Shared
from parallel.weight_transfer import bucket_bytes_for, most_channels


def push_table(cfg: Config) -> str:
    """Bytes of each rank and worker in one push, and the buffers of its channels."""
    shape, dims, num_engines = trained_shape(cfg), cfg.dims, cfg.rollout.num_engines
    check_divisible(shape, dims)
    check_lora(cfg.lora, shape, dims.tensor)
    check_adapters(cfg.lora, shape)
    senders, workers, itemsizes = _ends(cfg, shape)
    shares = list(all_shares(senders, workers))
    sources = senders_by_worker(shares, len(workers))
    megabytes = cfg.rollout.update_weights_bucket_megabytes
    size = shard_bytes(workers, itemsizes)
    slot = bucket_bytes_for(megabytes * 1_000_000, sources, num_engines, size)
    push = traffic(
        shares,
        num_workers=len(workers),
        num_ranks=dims.world_size,
        num_engines=num_engines,
        itemsizes=itemsizes,
        max_elements=slot // max(itemsizes.values()),
    )
    return "\n".join(
        [
            *_trainer_rows(push, Counter(chain.from_iterable(sources)), dims.pipeline),
            f"sum {_size(sum(push.sent))}; the busiest rank sends {push.imbalance:.3f} times the "
            f"mean; {push.num_messages:,} boxes of at most {_size(slot)}",
            "",
            *_engine_rows(push, sources),
            f"sum {_size(sum(push.received))}",
            "",
            f"each channel has two buffers of {_size(slot)}: at most "
            f"{_size(2 * slot * most_channels(sources, num_engines))} in one process "
            f"(rollout.update_weights_bucket_megabytes: {megabytes})",
        ]
    )


def _ends(
    cfg: Config, shape: ModelShape
) -> tuple[Iterable[Sender], list[Layout], Mapping[str, int]]:
    """(sending ranks, layout of each worker, bytes per element by parameter)."""
    if cfg.lora.is_served:
        workers = worker_shards(cfg, shape).pushed
        itemsizes = dict.fromkeys(workers[0].shapes, ITEMSIZE[cfg.model.dtype])
        return first_adapter_senders(cfg.lora, shape, cfg.dims), workers, itemsizes
    workers = worker_layouts(shape, cfg.rollout)
    model = quantized_engine(cfg.rollout, shape, cfg.model.dtype)
    return first_senders(shape, cfg.dims), workers, worker_itemsizes(cfg, shape, model)


@dataclass(frozen=True)
class Traffic:
    """The bytes of one push."""

    sent: list[int]
    """Bytes sent by each trainer rank."""
    received: list[int]
    """Bytes received by each engine rank: all workers of the first engine, then of the next."""
    forwarded: list[int]
    """Bytes that each engine rank forwards to the next engine."""
    num_messages: int
    """Number of copies from trainer ranks to the first engine."""

    @property
    def imbalance(self) -> float:
        """Bytes of the busiest sender, divided by the mean over senders."""
        return max(self.sent) * len(self.sent) / sum(self.sent)


def traffic(
    shares: Iterable[tuple[int, Shared]],
    *,
    num_workers: int,
    num_ranks: int,
    num_engines: int,
    itemsizes: Mapping[str, int],
    max_elements: int,
) -> Traffic:
    """The traffic of one push from `num_ranks` trainer ranks.

    `shares` come from `all_shares`, for the `num_workers` workers of the first engine; `itemsizes`
    are bytes per element of each of their parameters.
    """
    sent, messages = [0] * num_ranks, 0
    received = [0] * num_workers
    for rank, (worker, _, want, box) in shares:
        num_bytes = box.num_elements * itemsizes[want.local]
        sent[rank] += num_bytes
        received[worker] += num_bytes
        messages += len(box.cut(max_elements))
    forwarded = received * (num_engines - 1) + [0] * num_workers
    return Traffic(sent, received * num_engines, forwarded, messages)


def _trainer_rows(push: Traffic, channels: Counter[int], num_stages: int) -> list[str]:
    rows = [["trainer ranks", "stage", "each sends at least", "at most", "channels"]]
    size = len(push.sent) // num_stages
    for stage in range(num_stages):
        ranks = range(stage * size, (stage + 1) * size)
        sent = [push.sent[rank] for rank in ranks]
        most = max(channels[rank] for rank in ranks)
        rows.append([_ranks(ranks), str(stage), _size(min(sent)), _size(max(sent)), str(most)])
    return table(rows, left=(0,))


def _engine_rows(push: Traffic, sources: Sequence[Sequence[int]]) -> list[str]:
    rows = [["engine ranks", "engine", "fed by", "channels in", "out", "receives", "passes on"]]
    size, channels = len(sources), max(map(len, sources))
    num_engines = len(push.received) // size
    for engine in range(num_engines):
        ranks = range(engine * size, (engine + 1) * size)
        received, passed_on = (
            _size(max(num_bytes[rank] for rank in ranks))
            for num_bytes in (push.received, push.forwarded)
        )
        source = f"engine {engine - 1}" if engine else "trainer"
        out = channels if engine + 1 < num_engines else 0
        cells = [str(engine), source, str(channels), str(out), received, passed_on]
        rows.append([_ranks(ranks), *cells])
    return table(rows, left=(0, 2))


def _ranks(ranks: range) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def _size(num_bytes: int) -> str:
    """Format bytes for people, with two decimals, in powers of 1,000."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:,.2f} {unit}"
    return f"{num_bytes} B"


if __name__ == "__main__":
    print(push_table(load_config(Path(sys.argv[1]), sys.argv[2:])))
