"""Pushes from Megatron-Core ranks into vLLM workers, compared with vLLM's own loader.

The ranks also export the pushed weights as a Hugging Face folder. To check a push, each worker lets
vLLM load that folder into a second worker of the same rank, and compares the two.
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from checkpoint_convert.vllm import EngineDims
from helpers.engines.vllm_workers import (
    WorkerClient,
    WorkerEngines,
    WorkerProcess,
    parameters_of,
    start_worker,
)
from helpers.models.conversions import bytes_of
from helpers.oracle.policies import tiny_config
from megatron_grpo.config.trained_shape import trained_shape
from megatron_grpo.engine_weights.checksums import pushed_weights
from megatron_grpo.policy.export import export_model
from megatron_grpo.policy.model import Policy, build_policy, weight_sender
from megatron_grpo.timing import PhaseTimer
from megatron_grpo.weight_sync import WeightSync
from parallel import ParallelDims
from parallel.cpu_device import setup_device
from parallel.groups import Groups, init_groups
from parallel.weight_transfer.local_channels import LocalChannel
from parallel.weight_transfer.network_channels import NetworkChannel

DTYPE = "bfloat16"

Engines = dict[int, WorkerEngines]
"""Keyed by tensor-parallel size."""


@dataclass(frozen=True)
class Case:
    """One model and the kinds of engine that it is pushed into."""

    folder: Path
    """The weights that are pushed."""
    others: Path
    """Other weights of the same shapes; engines start with these."""
    engines: Sequence[EngineDims]
    also: str = ""
    """A further trained part that is pushed: a key of `vllm_workers.OPTIONS`."""

    @property
    def options(self) -> list[str]:
        """Overrides of the config."""
        table = "{method: mtp, num_speculative_tokens: 1}"
        overrides = {
            "": [],
            "mtp": ["model.mtp_num_layers=1", f"rollout.vllm.speculative_config={table}"],
            "vision": ["model.freeze_vision=false", "data.image_column=image"],
        }
        return [f"model.dtype={DTYPE}", *overrides[self.also]]


@dataclass(frozen=True)
class Sent:
    """The report of one rank on a push."""

    planned_bytes: int
    num_boxes: int
    bytes_handed_over: int


@dataclass(frozen=True)
class Held:
    """The report of one worker after a push."""

    differing: list[str]
    """Parameters that differ from those that vLLM loads from the exported folder."""
    unchanged: list[str]
    """Parameters that the push left unchanged."""
    shard_bytes: int
    """Bytes of the parameters, without vLLM's padding."""
    bytes_received: int


Pushed = tuple[Sent, list[list[Held]]]
"""A rank's report and, on rank 0 only, the workers' reports by engine."""


def push_all(
    rank: int, dims: ParallelDims, cases: Sequence[Case], engines: Engines, transport: str
) -> list[Pushed]:
    """Push every case into every kind of engine, from one rank of a trainer at `dims`."""
    setup_device(rank)
    groups = init_groups(dims)
    counts = count_bytes()
    pushed = []
    for case in cases:
        cfg = tiny_config(case.folder, dims, *case.options)
        policy = build_policy(cfg, trained_shape(cfg), groups)
        exported = case.folder.with_name(f"{case.folder.name}-exported")
        export_model(exported, policy, cfg, groups)
        for kind in case.engines:
            client = WorkerClient(engines[kind.num_workers])
            if rank == 0:
                client.workers.call(begin_with, case.others, kind, case.also)
            sent = push(case, policy, groups, client, kind, transport, counts)
            dist.barrier()
            held = client.workers.call(compare, exported, kind, case.also) if rank == 0 else []
            pushed.append((sent, held))
    return pushed


def count_bytes() -> list[int]:
    """Record the size of each buffer that this process hands over from now on."""
    counts: list[int] = []
    for end in (LocalChannel, NetworkChannel):

        def counting(self, num_bytes: int, send_bucket=end.send_bucket) -> None:
            counts.append(num_bytes)
            send_bucket(self, num_bytes)

        end.send_bucket = counting
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
        *case.options,
        f"rollout.base_urls=[{', '.join(client.base_urls)}]",
        f"rollout.tensor_parallel_size={kind.tensor}",
        f"rollout.data_parallel_size={kind.data}",
        f"rollout.vllm.enable_expert_parallel={str(kind.expert_parallel).lower()}",
        f"rollout.weight_transport={transport}",
        "rollout.update_weights_bucket_megabytes=2",  # several buckets for each channel
    )
    source: Any = client if groups.rank == 0 else None
    sender = weight_sender(policy, groups)
    counts.clear()
    with closing(WeightSync(cfg, policy.shape, sender, torch.device("cpu"), 1, source)) as sync:
        sync.push(lambda: pushed_weights(policy, cfg, groups), 1, PhaseTimer(lambda name: None))
        num_boxes = sum(map(len, sync._transport._sends.values()))
        return Sent(sync._transport._sender.bytes_sent, num_boxes, sum(counts))


def begin_with(process: WorkerProcess, others: Path, kind: EngineDims, also: str) -> None:
    process.serve(others, kind, DTYPE, also)
    process.before = {k: v.clone() for k, v in parameters_of(process.worker).items()}


def compare(process: WorkerProcess, exported: Path, kind: EngineDims, also: str) -> Held:
    held = parameters_of(process.worker)
    loaded = parameters_of(start_worker(process.rank, exported, kind, DTYPE, also))
    transfer = process.worker.push_worker
    pushed = transfer.weights()
    changed = differing(held, process.before)
    # Among the workers that split an expert, only the first has its output bias.
    zeros = {name for name, v in held.items() if name.endswith(".w2_bias") and not v.any()}
    bytes_received = transfer._receiver.bytes_received
    transfer.close()  # the next push may be into another worker of this process
    return Held(
        differing=differing(held, loaded),
        unchanged=[name for name in held if name not in changed and name not in zeros],
        shard_bytes=sum(v.nbytes for name, v in pushed.items() if name not in zeros)
        - padding_bytes(process.worker),
        bytes_received=bytes_received,
    )


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Names of tensors that exist on one side only or are not bitwise equal."""
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
    """Bytes of vLLM's padding in this worker's part of the vocabulary."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    padded = {  # keyed by weight: a tied head shares the embedding's
        id(module.weight): module.shard_indices.num_org_vocab_padding * module.weight[0].nbytes
        for module in worker.get_model().modules()
        if isinstance(module, VocabParallelEmbedding)
    }
    return sum(padded.values())
