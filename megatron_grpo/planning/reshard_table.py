"""Traffic of one push of weights, computed from only the config and config.json."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod

from checkpoint_convert import ModelShape, check_divisible, hf_tensors
from checkpoint_convert.megatron import first_senders
from megatron_grpo.config.config import Config
from megatron_grpo.config.trained_shape import trained_shape
from megatron_grpo.engine_weights.layouts import (
    quantized_engine,
    shard_bytes,
    worker_layouts,
    worker_shards,
)
from megatron_grpo.engines.vllm.args import check_adapters
from megatron_grpo.planning.card import ITEMSIZE, file_itemsizes, worker_itemsizes
from megatron_grpo.policy.lora_targets import check_lora, first_adapter_senders, peft_tensors
from parallel import Layout, Sender, all_shares, senders_by_worker
from parallel.reshard import Shared
from parallel.weight_transfer import bucket_bytes_for, most_channels


def reshard_table(cfg: Config) -> str:
    """A table of the bytes that each process sends and receives in one push, and of the buffers.

    Raises ValueError when the mesh of the trainer or an engine cannot split the model, or when
    `rollout.update_weights_bucket_megabytes` is too small for the buffers.
    """
    shape, dims, num_engines = trained_shape(cfg), cfg.dims, cfg.rollout.num_engines
    check_divisible(shape, dims)
    check_lora(cfg.lora, shape, dims.tensor)
    check_adapters(cfg.lora, shape)
    senders, workers, itemsizes = _ends(cfg, shape)
    shares = list(all_shares(senders, workers))
    sources = senders_by_worker(shares, len(workers))
    megabytes = cfg.rollout.update_weights_bucket_megabytes
    limit = megabytes * 1_000_000
    slot = bucket_bytes_for(limit, sources, num_engines, shard_bytes(workers, itemsizes))
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
            _model_line(cfg, shape),
            "",
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
    """The ranks that send, what each worker gets, and the bytes of an element of it by name."""
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


def _model_line(cfg: Config, shape: ModelShape) -> str:
    elements = {name: prod(size) for name, size in hf_tensors(shape).items()}
    itemsizes = file_itemsizes(cfg, shape)
    num_bytes = sum(itemsizes[name] * count for name, count in elements.items())
    line = (
        f"{shape.family}, {sum(elements.values()) / 1e9:,.2f} B parameters in {cfg.model.dtype}: "
        f"{_size(num_bytes)}"
    )
    if not cfg.lora.r:
        return line
    count = sum(map(prod, peft_tensors(cfg.lora, shape).values()))
    adapters = (
        f"adapters of rank {cfg.lora.r} with {count / 1e6:,.2f} M: "
        f"{_size(count * ITEMSIZE[cfg.model.dtype])}"
    )
    pushed = "which alone are pushed" if cfg.lora.is_served else "which are pushed merged into them"
    return f"{line}; {adapters}, {pushed}"


def _trainer_rows(push: Traffic, channels: Counter[int], num_stages: int) -> list[str]:
    rows = [
        f"{'trainer ranks':<16}{'stage':>6}{'each sends at least':>22}{'at most':>12}"
        f"{'channels':>11}"
    ]
    size = len(push.sent) // num_stages
    for stage in range(num_stages):
        of_stage = range(stage * size, (stage + 1) * size)
        sent = [push.sent[rank] for rank in of_stage]
        rows.append(
            f"{_ranks(of_stage.start, size):<16}{stage:>6}{_size(min(sent)):>22}"
            f"{_size(max(sent)):>12}{max(channels[rank] for rank in of_stage):>11}"
        )
    return rows


def _engine_rows(push: Traffic, sources: Sequence[Sequence[int]]) -> list[str]:
    tensor, most_channels = len(sources), max(map(len, sources))
    num_engines = len(push.received) // tensor
    rows = [
        f"{'engine ranks':<13}{'engine':>7}{'fed by':>10}{'channels in':>12}{'out':>5}"
        f"{'each receives':>15}{'passes on':>12}"
    ]
    for engine in range(num_engines):
        ranks = slice(engine * tensor, (engine + 1) * tensor)
        feeder = f"engine {engine - 1}" if engine else "trainer"
        channels_out = most_channels if engine + 1 < num_engines else 0
        rows.append(
            f"{_ranks(engine * tensor, tensor):<13}{engine:>7}{feeder:>10}{most_channels:>12}"
            f"{channels_out:>5}{_size(max(push.received[ranks])):>15}"
            f"{_size(max(push.forwarded[ranks])):>12}"
        )
    return rows


def _ranks(first: int, count: int) -> str:
    return str(first) if count == 1 else f"{first}-{first + count - 1}"


def _size(num_bytes: int) -> str:
    """Format bytes for people, with two decimals, in powers of 1,000."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:,.2f} {unit}"
    return f"{num_bytes} B"
