"""Who sends what to whom, for a 70B model on as many trainer ranks as engine GPUs. Metadata alone.

64 ranks (TP8, PP4, DP2) push into 8 vLLM engines of TP8, and 256 (TP8, PP8, DP4) into 32. Seconds:
what one rank takes to know all that it sends. Ours are of everything that a rank works out before
it opens channels: the layouts of the engine's workers and its own, the plan, and its buckets.
Awex's are of `build_local_transfer_plan` alone; its ranks have then told each other their metadata.

Bytes are those that the busiest engine rank receives, of 64, and that the busiest trainer rank
sends. Ours sends to one engine, which passes on what arrives; with Awex trainers send to all. Sides
that are called rules are computed from what their documentation says: NeMo-RL sends the matrices of
MLPs from shard to shard and all else whole, slime gathers tensors and broadcasts them whole.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from best_time import best_time
from checkpoint_convert import hf_tensors
from checkpoint_convert.megatron import first_senders, megatron_sender
from checkpoint_convert.vllm import EngineDims, _cut, engine_layouts
from helpers.models.shapes import LLAMA_70B
from parallel import Layout, ParallelDims, all_shares, cut_shares, plan_shares
from peer_bytes import m2n_elements, nccl_elements
from push_table import traffic

RANKS = {
    64: ParallelDims(tensor=8, pipeline=4, data=2),
    256: ParallelDims(tensor=8, pipeline=8, data=4),
}
ENGINE = EngineDims(tensor=8)
RANK = 5
"""Whose plan is timed: of the first stage, with a part of the embedding."""
NUM_TIMES = 20
ITEMSIZE, BUCKET_ELEMENTS = 2, 1 << 27

NCCL, M2N = "vLLM nccl (rule)", "vLLM nccl_m2n (rule)"
NEMO, SLIME = "NeMo-RL nccl_reshard (rule)", "slime (rule)"

ROUNDS = 3
TITLE = "Plan of a push, Llama-3.1-70B, 64 trainer ranks to 64 engine GPUs, and 256 to 256"
REQUIREMENTS = {"Awex": ["awex==0.9.0"]}
SETTINGS = {
    "Awex": "build_local_transfer_plan of a training rank, with QKV fused and gate and up not, as "
    "its converter does; no stub",
    NCCL: "every tensor is broadcast whole",
    M2N: "with dst_mesh_dims (engines, 8)",
    NEMO: "MLPs from shard to shard, all else whole",
    SLIME: "every tensor is gathered and broadcast whole",
}
GOALS = [
    ("plan_of_64_seconds", "Awex", 2.0),
    ("plan_of_256_seconds", "Awex", 5.0),
    ("received_gigabytes", NEMO, 2.4),
    ("received_gigabytes", SLIME, 7.9),
    ("received_gigabytes", NCCL, 7.9),
]


def ours(folder: Path) -> dict[str, float]:
    """What `WeightSync` works out, without communication."""

    def plan(dims: ParallelDims) -> None:
        _cut.cache_clear()  # a process plans once
        workers = engine_layouts(LLAMA_70B, ENGINE)
        place = dims.coordinates(RANK)
        sender = megatron_sender(LLAMA_70B, dims, place, transformer_engine=True)
        cut_shares(plan_shares(sender, workers), BUCKET_ELEMENTS)

    seconds = {count: best_time(partial(plan, dims), NUM_TIMES) for count, dims in RANKS.items()}
    workers = engine_layouts(LLAMA_70B, ENGINE)
    found = traffic(
        all_shares(first_senders(LLAMA_70B, RANKS[64]), workers),
        num_workers=ENGINE.tensor,
        num_ranks=64,
        num_engines=64 // ENGINE.tensor,
        itemsizes=dict.fromkeys(workers[0].shapes, ITEMSIZE),
        max_elements=BUCKET_ELEMENTS,
    )
    return figures(folder, found.received, found.sent, seconds)


def awex(folder: Path) -> dict[str, float]:
    """Plan by awex's `TransferPlanBuilder`."""
    from awex import logging
    from awex.transfer.transfer_plan import TransferPlanBuilder

    logging.setLevel("WARNING")
    seconds = {}
    received, sent = Counter[int](), Counter[int]()
    for count, dims in RANKS.items():
        builder = TransferPlanBuilder(count, count, num_infer_engines=count // ENGINE.tensor)
        metadata = awex_metadata(ParallelDims(tensor=ENGINE.tensor)), awex_metadata(dims)
        plan = partial(builder.build_local_transfer_plan, *metadata, count + RANK)
        seconds[count] = best_time(plan, NUM_TIMES)
        if count > 64:
            continue
        for operation in builder.build_weights_mapping_operations(*metadata):
            num_bytes = ITEMSIZE * prod(operation.overlap_shape)
            received[operation.recv_rank] += num_bytes
            sent[operation.send_rank] += num_bytes
    return figures(folder, [received[rank] for rank in range(64)], [*sent.values()], seconds)


def awex_metadata(dims: ParallelDims) -> list[Any]:
    """awex's metadata of all tensors, as its resolvers derive it from the shards of the ranks of
    `dims`."""
    import torch
    from awex.meta.weight_meta import ParameterMeta, ParameterReplicaMeta, ParameterShardMeta
    from awex.sharding.param_sharding import ShardingType

    by_stage = defaultdict(list)
    for rank in range(dims.world_size):
        by_stage[dims.coordinates(rank).pipeline].append(rank)
    tensors = awex_tensors()
    metadata = []
    for name, shape in tensors.items():
        split = split_of(name)
        ranks = by_stage[stage_of(name, dims.pipeline)]
        parts = dims.tensor if split is not None else 1
        size = tuple(n // parts if dim == split else n for dim, n in enumerate(shape))
        shards = []
        for rank in ranks:
            tensor = dims.coordinates(rank).tensor
            offset = tuple(tensor * n if dim == split else 0 for dim, n in enumerate(size))
            shards.append(
                ParameterShardMeta(
                    tp_rank=tensor,
                    attn_tp_rank=tensor,
                    pp_rank=stage_of(name, dims.pipeline),
                    ep_rank=0,
                    ep_tp_rank=0,
                    global_rank=rank,
                    world_size=dims.world_size,
                    engine_rank=0,
                    name=name,
                    shape=size,
                    numel=prod(size),
                    dtype=torch.bfloat16,
                    global_offset=offset,
                    sharding_type=ShardingType.NO_SHARDING
                    if split is None
                    else ShardingType.TP_SHARDING,
                    num_shards=parts,
                    sharding_dim=split or 0,
                )
            )
        replicas = [
            ParameterReplicaMeta(shards=shards[first : first + parts])
            for first in range(0, len(shards), parts)
        ]
        metadata.append(ParameterMeta(name, prod(shape), shape, torch.bfloat16, shards, replicas))
    return metadata


def awex_tensors() -> dict[str, tuple[int, ...]]:
    """Names and whole shapes; the projections of query, key and value are one."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in hf_tensors(LLAMA_70B).items():
        fused = name
        for x in "qkv":
            fused = fused.replace(f"{x}_proj", "qkv_proj") if f".{x}_proj" in name else fused
        rows = shapes[fused][0] if fused in shapes else 0
        shapes[fused] = (rows + shape[0], *shape[1:])
    return shapes


def split_of(name: str) -> int | None:
    """The dimension that tensor ranks share."""
    if "norm" in name:
        return None
    return 1 if "o_proj" in name or "down_proj" in name else 0


def stage_of(name: str, num_stages: int) -> int:
    """The pipeline stage that holds a tensor."""
    if "layers." in name:
        layer = int(name.split("layers.")[1].split(".")[0])
        return layer * num_stages // LLAMA_70B.num_layers
    return 0 if "embed" in name else num_stages - 1


def rule(received: Callable[[Layout], int], folder: Path) -> dict[str, float]:
    """What a worker receives, from the elements of its layout."""
    workers = engine_layouts(LLAMA_70B, ENGINE)
    by_rank = [ITEMSIZE * received(worker) for worker in workers] * (64 // ENGINE.tensor)
    (folder / "received.json").write_text(json.dumps(by_rank))
    return {"received_gigabytes": max(by_rank) / 1e9}


def whole(worker: Layout) -> int:
    """Every tensor."""
    return sum(nccl_elements(LLAMA_70B).values())


def m2n(worker: Layout) -> int:
    """As `peer_bytes` says."""
    return sum(m2n_elements(LLAMA_70B, worker).values())


def whole_but_mlps(worker: Layout) -> int:
    """The worker's share of the matrices of MLPs, and all else."""
    mlps = sum(p.box.num_elements for p in worker.pieces if ".mlp." in p.tensor)
    others = [n for name, n in nccl_elements(LLAMA_70B).items() if ".mlp." not in name]
    return mlps + sum(others)


def figures(
    folder: Path, received: list[int], sent: list[int], seconds: dict[int, float]
) -> dict[str, float]:
    """The figures of a side that has a planner, and by engine rank what it receives."""
    (folder / "received.json").write_text(json.dumps(received))
    return {
        **{f"plan_of_{count}_seconds": each for count, each in seconds.items()},
        "received_gigabytes": max(received) / 1e9,
        "trainer_sent_gigabytes": max(sent) / 1e9,
    }


SIDES = {
    "ours": ours,
    "Awex": awex,
    NCCL: partial(rule, whole),
    M2N: partial(rule, m2n),
    NEMO: partial(rule, whole_but_mlps),
    SLIME: partial(rule, whole),
}


def compare(ours: Path, peer: Path) -> str:
    """Ours receive what their parameters have; Awex's the same, by the rules none receive less."""
    own, other = (json.loads((folder / "received.json").read_text()) for folder in (ours, peer))
    held = [
        ITEMSIZE * sum(piece.box.num_elements for piece in worker.pieces)
        for worker in engine_layouts(LLAMA_70B, ENGINE)
    ] * (64 // ENGINE.tensor)
    assert own == held, (own, held)
    if peer.name == "Awex":
        assert other == own, (other, own)
        return "every engine rank receives as many bytes as with ours"
    assert min(other) >= max(own), (other, own)
    return "no engine rank receives less than with ours"
