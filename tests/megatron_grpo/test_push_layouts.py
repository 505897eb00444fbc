"""A push from real ranks into real workers: every bit where vLLM itself would have put it.

Ranks of Megatron-Core at every kind of layout push into a chain of two vLLM engines, and write the
same weights as a Hugging Face folder. Whatever vLLM loads from that folder into a worker of those
dims, every worker of both engines must hold; it held something else in every parameter before.
"""

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from checkpoint_convert import read_shape
from checkpoint_convert.families import FAMILIES
from checkpoint_convert.vllm import EngineDims
from conversions import bytes_of
from distributed import run_ranks
from megatron_grpo.export import export_model
from megatron_grpo.model import Policy, build_policy, weight_sender
from megatron_grpo.timing import PhaseTimer
from megatron_grpo.weight_sync import WeightSync
from models import tiny_model
from parallel import ParallelDims
from parallel.buckets import ALIGNMENT
from parallel.device import setup_device
from parallel.groups import Groups, init_groups
from parallel.local_links import LocalOutgoing
from parallel.network_links import NetworkOutgoing
from policies import tiny_config
from vllm_workers import start_worker
from worker_engines import (
    WorkerClient,
    WorkerEngines,
    WorkerProcess,
    parameters_of,
    worker_engines,
)

NUM_ENGINES = 2
DTYPE = "bfloat16"
TP1, TP2 = EngineDims(tensor=1), EngineDims(tensor=2)
EXPERT_PARALLEL = EngineDims(tensor=2, expert_parallel=True)
DENSE_LAYOUTS = [
    ParallelDims(),
    ParallelDims(tensor=2),
    ParallelDims(tensor=2, pipeline=2),
    ParallelDims(pipeline=2, virtual_pipeline=2),
    ParallelDims(tensor=2, context=2),
    ParallelDims(data=2),
]
EP2 = ParallelDims(data=2, expert=2)
MIXTURES = {name for name, family in FAMILIES.items() if family.experts is not None}

Engines = dict[int, WorkerEngines]
"""By their tensor parallel size."""


@dataclass(frozen=True)
class Case:
    """One model and the kinds of engine that it is pushed into."""

    folder: Path
    """Of the weights that are pushed."""
    others: Path
    """Of other weights of the same shapes, with which the engines begin."""
    engines: Sequence[EngineDims]


@dataclass(frozen=True)
class Sent:
    """What one rank has to say of a push."""

    planned_bytes: int
    num_boxes: int
    bytes_handed_over: int


@dataclass(frozen=True)
class Held:
    """What one worker has to say after a push."""

    differing: list[str]
    """Parameters that are not what vLLM has loaded from the exported folder."""
    unchanged: list[str]
    """Parameters that are what they were before the push."""
    shard_bytes: int
    """Of its parameters, without the padding that vLLM has added."""
    bytes_received: int


Pushed = tuple[Sent, list[list[Held]]]
"""What the workers say, by engine, is known to rank 0."""


def push_all(
    rank: int, dims: ParallelDims, cases: Sequence[Case], engines: Engines, transport: str
) -> list[Pushed]:
    """Push every case into every kind of engine, on a rank that trains at `dims`."""
    setup_device(rank)
    groups = init_groups(dims)
    counts = count_bytes()
    pushed = []
    for case in cases:
        cfg = tiny_config(case.folder, dims, f"model.dtype={DTYPE}")
        policy = build_policy(cfg, read_shape(case.folder), groups)
        exported = case.folder.with_name(f"{case.folder.name}-exported")
        export_model(exported, policy, cfg, groups)
        for kind in case.engines:
            client = WorkerClient(engines[kind.tensor])
            if rank == 0:
                client.workers.call(begin_with, case.others, kind)
            sent = push(case, policy, groups, client, kind, transport, counts)
            dist.barrier()
            held = client.workers.call(compare, exported, kind) if rank == 0 else []
            pushed.append((sent, held))
    return pushed


def count_bytes() -> list[int]:
    """From here on, note how many bytes of each buffer this process hands over."""
    counts: list[int] = []
    for end in (LocalOutgoing, NetworkOutgoing):

        def counting(self, num_bytes: int, hand_over=end.hand_over) -> None:
            counts.append(num_bytes)
            hand_over(self, num_bytes)

        end.hand_over = counting
    return counts


def push(
    case: Case,
    policy: Policy,
    groups: Groups,
    client: WorkerClient,
    kind: EngineDims,
    transport: str,
    counts: list[int],
) -> Sent:
    cfg = tiny_config(
        case.folder,
        groups.dims,
        f"model.dtype={DTYPE}",
        f"rollout.base_urls=[{', '.join(client.base_urls)}]",
        f"rollout.tensor_parallel_size={kind.tensor}",
        f"rollout.vllm.enable_expert_parallel={str(kind.expert_parallel).lower()}",
        f"rollout.weight_transport={transport}",
    )
    source: Any = client if groups.rank == 0 else None
    sender = weight_sender(policy, groups)
    counts.clear()
    with closing(WeightSync(cfg, policy.shape, sender, torch.device("cpu"), 1)) as sync:
        sync.push(policy.parameters(), source, 1, PhaseTimer())
        assert sync._outbox is not None
        num_boxes = sum(map(len, sync._sends.values()))
        return Sent(sync._outbox.bytes_sent, num_boxes, sum(counts))


def begin_with(process: WorkerProcess, others: Path, kind: EngineDims) -> None:
    process.serve(others, kind, DTYPE)
    process.before = {k: v.clone() for k, v in parameters_of(process.worker).items()}


def compare(process: WorkerProcess, exported: Path, kind: EngineDims) -> Held:
    held = parameters_of(process.worker)
    loaded = parameters_of(start_worker(process.rank, exported, kind, DTYPE))
    changed = differing(held, process.before)
    return Held(
        differing=differing(held, loaded),
        unchanged=[name for name in held if name not in changed],
        shard_bytes=sum(v.nbytes for v in held.values()) - padding_bytes(process.worker),
        bytes_received=process.worker.weight_transfer_engine._inbox.bytes_received,
    )


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Names of tensors of which there is one only, or that are not the same bit for bit."""
    return [
        name
        for name in {**found, **expected}
        if name not in found
        or name not in expected
        or found[name].shape != expected[name].shape
        or found[name].dtype != expected[name].dtype
        or not torch.equal(bytes_of(found[name]), bytes_of(expected[name]))
    ]


def padding_bytes(worker: Any) -> int:
    """What vLLM says that it has padded its parts of the vocabulary by."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    padded = {  # by its weight, as a tied head is the embedding
        id(module.weight): module.shard_indices.num_org_vocab_padding * module.weight[0].nbytes
        for module in worker.get_model().modules()
        if isinstance(module, VocabParallelEmbedding)
    }
    return sum(padded.values())


def check_pushes(
    dims: ParallelDims, cases: Sequence[Case], engines: Engines, transport: str
) -> None:
    ranks = run_ranks(dims.world_size, push_all, dims, cases, engines, transport, timeout=900)
    kinds = [(case, kind) for case in cases for kind in case.engines]
    for (case, kind), pushed in zip(kinds, zip(*ranks, strict=True), strict=True):
        where = f"{case.folder.name} at {dims} into {kind}"
        held = pushed[0][1]
        assert [len(workers) for workers in held] == [kind.tensor] * NUM_ENGINES
        for worker in (worker for workers in held for worker in workers):
            assert not worker.differing, where
            assert not worker.unchanged, where
            assert worker.bytes_received == worker.shard_bytes > 0, where
        sent = [sent for sent, _ in pushed]
        first = sum(worker.bytes_received for worker in held[0])
        assert sum(rank.planned_bytes for rank in sent) == first, where
        gaps = ALIGNMENT * sum(rank.num_boxes for rank in sent)
        assert first <= sum(rank.bytes_handed_over for rank in sent) < first + gaps, where


def servable_model(folder: Path, family: str, **overrides: Any) -> Path:
    """Heads of 32, the least that vLLM serves on a CPU; Qwen2 has them from its hidden size."""
    heads = {"hidden_size": 128} if family == "qwen2" else {"head_dim": 32}
    # Five layers split unevenly over every pipeline.
    return tiny_model(folder, family, num_hidden_layers=5, **(heads | overrides))


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """Two engines of one worker each and two of two, into which all pushes go."""
    with ExitStack() as stack:
        yield {
            size: stack.enter_context(
                worker_engines(NUM_ENGINES, size, tmp_path_factory.mktemp("sockets"), timeout=7200)
            )
            for size in (1, 2)
        }


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """What the engines begin with; after that, what was pushed before is still there."""
    folder = tmp_path_factory.mktemp("others")
    return {
        "qwen3": servable_model(folder / "qwen3", "qwen3", tied=True, seed=99),
        "qwen3_moe": servable_model(folder / "qwen3_moe", "qwen3_moe", seed=99),
    }


def layout_name(dims: ParallelDims) -> str:
    return f"{dims} vpp({dims.virtual_pipeline}) ep({dims.expert})"


@pytest.mark.parametrize("dims", DENSE_LAYOUTS, ids=layout_name)
def test_every_worker_holds_what_vllm_would_have_loaded(tmp_path, engines, others, dims):
    number = DENSE_LAYOUTS.index(dims)
    folder = servable_model(tmp_path / "model", "qwen3", tied=True, seed=number)
    transport = ("auto", "network")[number % 2]
    check_pushes(dims, [Case(folder, others["qwen3"], [TP1, TP2])], engines, transport)


def test_so_it_does_where_ranks_share_the_experts(tmp_path, engines, others):
    folder = servable_model(tmp_path / "model", "qwen3_moe")
    case = Case(folder, others["qwen3_moe"], [TP1, TP2, EXPERT_PARALLEL])
    check_pushes(EP2, [case], engines, "auto")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dims", [*DENSE_LAYOUTS, EP2], ids=layout_name)
@pytest.mark.parametrize("family", FAMILIES)
def test_so_it_does_for_any_family_and_number_of_heads(tmp_path, engines, family, dims):
    if dims.expert > 1 and family not in MIXTURES:
        pytest.skip("it has no experts")
    cases = []
    for kv_heads, tied in product((1, 2, 4), (False, True)):
        name = f"{family} kv_heads({kv_heads}) tied({tied})"
        folder, others = (
            servable_model(
                tmp_path / own, family, num_key_value_heads=kv_heads, tied=tied, seed=seed
            )
            for own, seed in ((name, 0), (f"{name} others", 1))
        )
        kinds = [TP1, TP2, *([EXPERT_PARALLEL] if family in MIXTURES else [])]
        cases.append(Case(folder, others, kinds))
    check_pushes(dims, cases, engines, "auto")
