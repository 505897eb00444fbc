"""Pushes of adapters from Megatron-Core ranks into vLLM workers that have loaded the base.

The ranks also export the adapters as a PEFT folder. To check a push, each worker lets vLLM load
that folder into a second worker of the same rank, and compares the two.
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from checkpoint_convert import read_shape
from checkpoint_convert.vllm import EngineDims
from helpers.engines.vllm_workers import WorkerClient, WorkerEngines, WorkerProcess, start_worker
from helpers.oracle.policies import tiny_config
from helpers.pushes.policies import flip_bits
from helpers.pushes.workers import differing
from megatron_grpo.config.config import Config
from megatron_grpo.engine_weights.checksums import loaded_sums
from megatron_grpo.engine_weights.protocol import pushable_parameters
from megatron_grpo.engines.vllm.args import adapter_arguments
from megatron_grpo.policy.export import export_model
from megatron_grpo.policy.model import Policy, build_policy, weight_sender
from megatron_grpo.policy.residency import EVERYTHING_STAYS, Residency, build_residency
from megatron_grpo.timing import PhaseTimer
from megatron_grpo.weight_sync import WeightSync
from parallel import ParallelDims
from parallel.cpu_device import setup_device
from parallel.groups import Groups, init_groups

CPU = torch.device("cpu")
PUSHES = 5


@dataclass(frozen=True)
class Case:
    """One kind of engine and the adapters pushed into it."""

    base: Path
    engine: EngineDims
    overrides: Sequence[str]


@dataclass(frozen=True)
class Held:
    """The report of one worker after a push."""

    differing: list[str]
    """Buffers and weights that differ from those of vLLM's second worker."""
    filled: int
    """Number of buffers that are not zero."""
    bytes_received: int


def config_of(case: Case, dims: ParallelDims, client: WorkerClient) -> Config:
    return tiny_config(
        case.base,
        dims,
        "model.dtype=bfloat16",
        f"rollout.base_urls=[{', '.join(client.base_urls)}]",
        f"rollout.tensor_parallel_size={case.engine.tensor}",
        "rollout.enable_sleep_mode=true",
        "train.offload=all",
        *case.overrides,
    )


def push_adapters(
    rank: int, dims: ParallelDims, case: Case, engines: WorkerEngines, folder: Path
) -> list[list[list[Held]]]:
    """Change and push the adapters `PUSHES` times; rank 0 returns [push][engine][worker].

    All state is away when a push begins, as when it replaces an engine lost while it generates.
    """
    setup_device(rank)
    client = WorkerClient(engines)
    cfg, groups = config_of(case, dims, client), init_groups(dims)
    policy = build_policy(cfg, read_shape(case.base), groups)
    held, residency = [], build_residency(cfg, policy, None, CPU, dims.world_size)
    with closing(start_sync(cfg, policy, groups, client, residency)) as sync:
        if rank == 0:
            client.workers.call(begin_adapters, case, cfg)
        for number in range(PUSHES):
            residency.enter("train")
            change(policy, number)
            residency.enter("generate")
            assert "weights" in residency.away
            sync.push(lambda: policy.served(cfg.lora), number, PhaseTimer(lambda name: None))
            export_model(folder / str(number), policy, cfg, groups, residency)
            dist.barrier()
            if rank == 0:
                held.append(client.workers.call(compare_adapters, folder / str(number)))
    return held


def failing_push(
    rank: int, dims: ParallelDims, case: Case, engines: WorkerEngines, fault: str
) -> str:
    """The error of a push with a flipped bit: in a worker's `base` weights or in a `sent` one."""
    setup_device(rank)
    # A failed push is repeated once, so two flips per worker.
    flip_bits(2 * case.engine.tensor if fault == "sent" else 0)
    client = WorkerClient(engines)
    cfg, groups = config_of(case, dims, client), init_groups(dims)
    policy = build_policy(cfg, read_shape(case.base), groups)
    with closing(start_sync(cfg, policy, groups, client)) as sync:
        if rank == 0:
            client.workers.call(begin_adapters, case, cfg)
            if fault == "base":
                client.workers.call(flip_bit_of_base)
        try:
            sync.push(lambda: policy.served(cfg.lora), 1, PhaseTimer(lambda name: None))
        except ConnectionError as failure:
            return str(failure)
    return ""


def start_sync(
    cfg: Config,
    policy: Policy,
    groups: Groups,
    client: WorkerClient,
    residency: Residency = EVERYTHING_STAYS,
) -> WeightSync:
    sender = weight_sender(policy, groups)
    loaded = loaded_sums(cfg, policy.shape, sender, policy.parameters())
    assert policy.adapters
    source: Any = client if groups.rank == 0 else None
    own = policy.adapters.sender
    return WeightSync(cfg, policy.shape, own, CPU, 1, source, residency, loaded)


def change(policy: Policy, number: int) -> None:
    """Fill the adapters with values of push `number`, which do not depend on the layout."""
    assert policy.adapters
    parameters = policy.adapters.parameters()
    for piece in policy.adapters.layout.pieces:
        generator = torch.Generator().manual_seed(sum(piece.tensor.encode()) + number)
        whole = torch.randn(policy.adapters.shapes[piece.tensor], generator=generator)
        values = parameters[piece.local].data[piece.local_box.slices]
        values.copy_(whole[piece.box.slices])


def described(process: WorkerProcess, case: Case, cfg: Config, other: dict[str, Any]) -> Any:
    """Descriptions of its parameters by a worker started with `other` arguments."""
    arguments = adapter_arguments(cfg.model, cfg.lora, on_gpu=False) | other
    worker = start_worker(process.rank, case.base, case.engine, cfg.model.dtype, **arguments)
    return worker.answer_push(call="describe_parameters", question="")["parameters"]


def begin_adapters(process: WorkerProcess, case: Case, cfg: Config) -> None:
    arguments = adapter_arguments(cfg.model, cfg.lora, on_gpu=False)
    process.worker, process.other = (
        start_worker(process.rank, case.base, case.engine, cfg.model.dtype, **arguments)
        for _ in range(2)
    )


def compare_adapters(process: WorkerProcess, exported: Path) -> Held:
    from vllm.lora.request import LoRARequest

    from megatron_grpo.engines.vllm.worker import adapter_buffers

    worker, other = process.worker, process.other
    # A request for the adapter: vLLM must use the pushed one, and read no file.
    worker.add_lora(LoRARequest("policy", 1, "no such folder"))
    other.remove_lora(1)
    other.add_lora(LoRARequest("policy", 1, str(exported)))
    models = [each.get_model() for each in (worker, other)]
    held, loaded = (pushable_parameters(model) | adapter_buffers(model) for model in models)
    transfer = worker.push_worker
    return Held(
        differing=differing(held, loaded),
        filled=sum(bool(each.any()) for each in adapter_buffers(models[0]).values()),
        bytes_received=transfer._receiver.bytes_received,
    )


def flip_bit_of_base(process: WorkerProcess) -> None:
    weight = dict(process.worker.get_model().named_parameters())[
        "model.layers.1.mlp.down_proj.base_layer.weight"
    ]
    weight.data.view(torch.int16)[0, 0] ^= 1
