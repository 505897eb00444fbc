"""A push of a Llama of 1.5B (bf16, 3.0 GB) from two trainer ranks, TP2, into one process, TP1.

Three processes on one machine; the third holds what Megatron's only rank would, so that both do the
same job. Megatron-Core's `swap_model_weights` goes over gloo, which is loopback, and receives into
the weights themselves where a part of them is contiguous. Ours goes over memory that processes
share, as from a trainer to an engine on the same machine, and once more over its network channels,
here loopback, too. It has 64 MB of buffers in a process; checksums of what was sent and of what is
held are compared, and that counts. The first push, which plans and makes channels, is counted
apart.

Memory is the most that a process held beyond the weights, from before the plan until after the last
push. Before each push memory is warmed (`warm_memory.py`). PUSH_LAYERS=4 makes the model smaller.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from checkpoint_convert import ModelShape
from checkpoint_convert.megatron import megatron_layout, megatron_sender
from helpers.ranks.processes import run_ranks
from helpers.models.shapes import DENSE
from parallel import Layout, ParallelDims, Shape
from warm_memory import warm_memory

LLAMA = ModelShape(
    num_layers=int(os.environ.get("PUSH_LAYERS", 16)),
    hidden_size=2048,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    intermediate_size=8192,
    vocab_size=128256,  # is padded to the same number of rows at TP1 and TP2
    **DENSE,
)
TRAINER, ENGINE = ParallelDims(tensor=2), ParallelDims()
RECEIVER = TRAINER.world_size
"""The rank that is no trainer."""
BUFFER_BYTES = 64_000_000
PUSHES = 3
TIMEOUT = timedelta(seconds=120)
WARM_FACTOR = 0.5
"""Fraction of the model's bytes: Megatron-Core's receiver took 0.3 for tensors that are not
contiguous."""

TITLE = (
    f"Push of {LLAMA.num_layers} layers of Llama-3.2-1B, untied, bf16, TP2 to TP1 on one machine"
)
REQUIREMENTS: dict[str, list[str]] = {"megatron-core": []}  # ours needs it, too
SETTINGS = {
    "ours, by network": "rollout.weight_transport=network",
    "megatron-core": f"{version('megatron-core')}, swap_model_weights with its cached plan and "
    "NCCLCopyService, whose group is gloo here: GlooCopyService copies everything to pinned memory "
    "first, which takes a GPU; models are bare parameters with Megatron's attributes; torch.cuda's "
    "calls answered for the CPU as for ours",
}
# They were 8 and 40 against megatron-core 0.16.1, which staged the model; 0.19 receives in place.
GOALS = [("seconds", "megatron-core", 3.0), ("peak_extra_bytes", "megatron-core", 6.0)]

Push = Callable[[], None]


def ours(folder: Path) -> dict[str, float]:
    """WeightSender and WeightReceiver."""
    return measured(folder, our_rank, False)


def ours_by_network(folder: Path) -> dict[str, float]:
    """As between two machines."""
    return measured(folder, our_rank, True)


def megatron(folder: Path) -> dict[str, float]:
    """Megatron-Core's resharding."""
    return measured(folder, megatron_rank)


def measured(
    folder: Path, rank_of: Callable[..., dict[str, Any]], *options: bool
) -> dict[str, float]:
    """The figures of all processes, and the digest of what has arrived."""
    found = run_ranks(RECEIVER + 1, rank_of, *options, timeout=900)
    (folder / "digest.json").write_text(json.dumps(found[RECEIVER]["digest"]))
    held = layout_of(ENGINE, 0).num_elements * 2
    extra = max(each["extra"] for each in found)
    return {
        "seconds": max(each["seconds"] for each in found),
        "first_seconds": max(each["first"] for each in found),
        "peak_extra_bytes": extra,
        "extra_of_model": extra / held,
    }


def layout_of(dims: ParallelDims, rank: int) -> Layout:
    """What Megatron's rank holds."""
    return megatron_layout(LLAMA, dims, dims.coordinates(rank), transformer_engine=False)


def weights_of(rank: int) -> dict[str, Tensor]:
    """Any bits on the trainer's ranks, the same on both in norms; anything on the receiver."""
    whole = layout_of(ENGINE, 0).shapes
    if rank == RECEIVER:
        return {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in whole.items()}
    shapes = layout_of(TRAINER, rank).shapes
    return {
        name: bits(shape, crc32(name.encode()) + (rank if shape != whole[name] else 0))
        for name, shape in shapes.items()
    }


def bits(shape: Shape, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.empty(shape, dtype=torch.int16).random_(-(1 << 15), 1 << 15, generator=generator)
    return drawn.view(torch.bfloat16)


def our_rank(rank: int, network_only: bool) -> dict[str, Any]:
    """One process of ours."""
    from megatron_grpo.weight_sync import sums_of_all_ranks
    from parallel import plan_sends
    from parallel.weight_transfer import (
        TransferInitInfo,
        WeightReceiver,
        WeightSender,
        bucket_bytes_for,
    )
    from parallel.weight_transfer.rendezvous import RendezvousAddress, join, open_rendezvous

    weights = weights_of(rank)
    device, dtype = torch.device("cpu"), torch.bfloat16
    worker = layout_of(ENGINE, 0)
    ends: list[Any] = []

    def channels() -> WeightSender | WeightReceiver:
        trainers = [*range(RECEIVER)]
        size = bucket_bytes_for(BUFFER_BYTES, [trainers], 1, worker.num_elements * 2)
        said: list[Any] = [None]
        if rank == 0:
            address, rendezvous = open_rendezvous("127.0.0.1")
            ends.append(rendezvous)
            said = [(address.host, address.port)]
        dist.broadcast_object_list(said, src=0)
        init_info = TransferInitInfo(
            RendezvousAddress(*said[0]), size, 1, network_only, [trainers], [[]]
        )
        if rank == RECEIVER:
            return WeightReceiver(init_info, 0, 0, weights, device, TIMEOUT)
        place = TRAINER.coordinates(rank)
        sender = megatron_sender(LLAMA, TRAINER, place, transformer_engine=False)
        sends = plan_sends(sender, [worker], size // dtype.itemsize)
        rendezvous = join(init_info.rendezvous, TIMEOUT)
        shapes, dtypes = [worker.shapes], dict.fromkeys(worker.shapes, dtype)
        return WeightSender(init_info, rendezvous, rank, sends, shapes, dtypes, device, TIMEOUT)

    def push() -> None:
        if not ends or not isinstance(ends[-1], WeightSender | WeightReceiver):
            ends.append(channels())
        end = ends[-1]
        sent = end.send_weights(weights) if isinstance(end, WeightSender) else {}
        held = end.receive_weights(weights) if isinstance(end, WeightReceiver) else None
        [expected] = sums_of_all_ranks(sent, [worker])
        assert held is None or held == expected

    found = run(rank, weights, push)
    ends[-1].close()
    return found


def megatron_rank(rank: int) -> dict[str, Any]:
    """One process of Megatron-Core's, which has one of the two models."""
    from megatron.core.resharding.refit import swap_model_weights

    from parallel.cpu_device import setup_device

    setup_device(rank)
    weights = weights_of(rank)
    groups = [dist.new_group([other]) for other in range(RECEIVER + 1)]
    trainers = dist.new_group([*range(RECEIVER)])
    is_receiver = rank == RECEIVER
    tensor = groups[rank] if is_receiver else trainers
    model = Bare(weights, layout_of(ENGINE, 0).shapes, groups[rank], tensor)
    source, target = (None, model) if is_receiver else (model, None)
    return run(rank, weights, lambda: swap_model_weights(source, target, "nccl"))


class Bare(torch.nn.Module):
    """Parameters under Megatron's names, with the attributes that its layers give them."""

    def __init__(
        self, weights: Mapping[str, Tensor], whole: Mapping[str, Shape], data: Any, tensor: Any
    ) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_moe_experts=None)
        self.pg_collection = SimpleNamespace(tp=tensor, dp=data, pp=None, ep=None)
        self._named = []
        for name, values in weights.items():
            parameter: Any = torch.nn.Parameter(values, requires_grad=False)
            if len(whole[name]) > 1:
                parameter.tensor_model_parallel = True
                parameter.partition_dim = int("linear_proj" in name or "linear_fc2" in name)
                parameter.partition_stride = 2 if "linear_fc1" in name else 1
            self._named.append((name, parameter))

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """Names have dots in them, which modules of torch would not have."""
        return iter(self._named)


def run(rank: int, weights: Mapping[str, Tensor], push: Push) -> dict[str, Any]:
    """What a process measures of a first push and of others, and the digest of what it holds."""
    seconds = []
    before = watch_peak()
    for _ in range(1 + PUSHES):
        if rank == RECEIVER:
            for values in weights.values():
                values.zero_()  # what has arrived before does not count
            warm_memory(int(WARM_FACTOR * 2 * layout_of(ENGINE, 0).num_elements))
        dist.barrier()
        start = time.perf_counter()
        push()
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    return {
        "first": seconds[0],
        "seconds": sorted(seconds[1:])[PUSHES // 2],
        "extra": resident("VmHWM") - before,
        "digest": digest(weights) if rank == RECEIVER else "",
    }


def watch_peak() -> int:
    """Have the peak of this process's memory begin now; its present bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def resident(field: str) -> int:
    """Bytes by /proc."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


def digest(weights: Mapping[str, Tensor]) -> str:
    """Hash of all bits, in the order of names."""
    found = sha256()
    for name in sorted(weights):
        found.update(weights[name].view(torch.uint8).numpy())
    return found.hexdigest()


SIDES = {"ours": ours, "ours, by network": ours_by_network, "megatron-core": megatron}


def compare(ours: Path, peer: Path) -> str:
    """Bit for bit."""
    own, other = (json.loads((folder / "digest.json").read_text()) for folder in (ours, peer))
    assert own == other, (own, other)
    return "what has arrived is the same bit for bit"
