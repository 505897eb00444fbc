"""What a run would do, computed from its config and the model's config.json alone."""

from math import prod

import torch

from checkpoint_convert import check_divisible, hf_tensors, read_shape
from checkpoint_convert.megatron import first_senders
from megatron_grpo.config import Config
from megatron_grpo.weight_sums import worker_layouts
from parallel import Traffic, fed_engines, traffic

MAX_BOX_BYTES = 256 << 20
"""Of one message: half of the default of 512 MB for two buffers."""


def reshard_table(cfg: Config) -> str:
    """Who sends how many bytes to whom in one push of weights, as a table.

    Raises ValueError when the mesh of the trainer or an engine cannot split the model.
    """
    shape, dims = read_shape(cfg.model.path), cfg.dims
    check_divisible(shape, dims)
    workers = worker_layouts(shape, cfg.rollout)
    itemsize = getattr(torch, cfg.model.dtype).itemsize
    push = traffic(
        first_senders(shape, dims),
        workers,
        num_ranks=dims.world_size,
        num_engines=cfg.rollout.num_engines,
        itemsize=itemsize,
        max_elements=MAX_BOX_BYTES // itemsize,
    )
    num_parameters = sum(map(prod, hf_tensors(shape).values()))
    return "\n".join(
        [
            f"{shape.family}, {num_parameters / 1e9:,.2f} B parameters in {cfg.model.dtype}: "
            f"{_size(num_parameters * itemsize)}",
            "",
            *_trainer_rows(push, dims.pipeline),
            f"sum {_size(sum(push.sent))}; the busiest rank sends {push.imbalance:.3f} times the "
            f"mean; {push.num_messages:,} messages of at most {_size(MAX_BOX_BYTES)}",
            "",
            *_engine_rows(push, len(workers)),
            f"sum {_size(sum(push.received))}",
        ]
    )


def _trainer_rows(push: Traffic, num_stages: int) -> list[str]:
    rows = [f"{'trainer ranks':<16}{'stage':>6}{'each sends at least':>22}{'at most':>12}"]
    size = len(push.sent) // num_stages
    for stage in range(num_stages):
        sent = push.sent[stage * size : (stage + 1) * size]
        ranks = _ranks(stage * size, size)
        rows.append(f"{ranks:<16}{stage:>6}{_size(min(sent)):>22}{_size(max(sent)):>12}")
    return rows


def _engine_rows(push: Traffic, tensor: int) -> list[str]:
    num_engines = len(push.received) // tensor
    feeders = {fed: e for e in range(num_engines) for fed in fed_engines(e, num_engines)}
    rows = [
        f"{'engine ranks':<16}{'engine':>6}{'fed by':>12}{'each receives':>16}{'passes on':>12}"
    ]
    for engine in range(num_engines):
        ranks = slice(engine * tensor, (engine + 1) * tensor)
        feeder = f"engine {feeders[engine]}" if engine else "trainer"
        rows.append(
            f"{_ranks(engine * tensor, tensor):<16}{engine:>6}{feeder:>12}"
            f"{_size(max(push.received[ranks])):>16}{_size(max(push.forwarded[ranks])):>12}"
        )
    return rows


def _ranks(first: int, count: int) -> str:
    return str(first) if count == 1 else f"{first}-{first + count - 1}"


def _size(num_bytes: int) -> str:
    """Bytes for people: three digits and more, in powers of 1,000."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:,.2f} {unit}"
    return f"{num_bytes} B"
