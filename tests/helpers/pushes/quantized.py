"""Pushes of quantised weights into vLLM workers, compared with what vLLM loads from an export.

The ranks also export the pushed weights as a quantised folder. To check a push, each worker lets
vLLM load that folder into a second worker of the same rank, and compares the two. Quantised exports
have no layer for multi-token prediction: where it drafts, the export is plain, and the second
worker quantises what it loads.
"""

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist

from checkpoint_convert.vllm import EngineDims
from helpers.engines.vllm_workers import (
    WorkerClient,
    WorkerEngines,
    WorkerProcess,
    parameters_of,
    start_worker,
)
from helpers.oracle.policies import tiny_config
from helpers.pushes.policies import flip_bits
from helpers.pushes.workers import differing, padding_bytes
from megatron_grpo.config.config import Config
from megatron_grpo.config.trained_shape import trained_shape
from megatron_grpo.engine_weights.checksums import pushed_sender, pushed_weights
from megatron_grpo.engine_weights.protocol import ABSORBED, pushable_parameters
from megatron_grpo.engines.vllm.args import quantizing_arguments
from megatron_grpo.policy.export import export_model
from megatron_grpo.policy.model import Policy, build_policy, weight_sender
from megatron_grpo.policy.residency import (
    EVERYTHING_STAYS,
    Residency,
    build_residency,
    chained_optimizers,
)
from megatron_grpo.timing import PhaseTimer
from megatron_grpo.weight_sync import WeightSync
from parallel import ParallelDims
from parallel.cpu_device import setup_device
from parallel.groups import Groups, init_groups

CPU = torch.device("cpu")
MTP = [
    "model.mtp_num_layers=1",
    "rollout.vllm.speculative_config={method: mtp, num_speculative_tokens: 1}",
]


@dataclass(frozen=True)
class Case:
    """A model, its quantisation, and the kind of engine that it is pushed into."""

    folder: Path
    engine: EngineDims
    quantization: str
    ignored: str = ""
    """Pattern of modules that stay unquantised; "": none."""
    transport: str = "auto"
    also: str = ""
    """A further trained part that is pushed: `mtp`, or nothing."""


@dataclass(frozen=True)
class Held:
    """The report of one worker."""

    loaded: list[str]
    """Parameters that differed before any push from those that vLLM loads from an export."""
    differing: list[str]
    """Parameters that differ after a push from those that vLLM loads from the export."""
    bytes_received: int | None
    """None from a folder."""
    share: float
    """Bytes of 8-bit weights and their scales, relative to the weights in bfloat16."""
    bytes_held: int
    """Bytes of all parameters, without vLLM's padding."""
    error: float
    """Error of a product by vLLM's layer, relative to the largest element of the exact product."""


def config_of(case: Case, dims: ParallelDims, client: WorkerClient) -> Config:
    return tiny_config(
        case.folder,
        dims,
        "model.dtype=bfloat16",
        f"rollout.base_urls=[{', '.join(client.base_urls)}]",
        f"rollout.tensor_parallel_size={case.engine.tensor}",
        f"rollout.vllm.enable_expert_parallel={str(case.engine.expert_parallel).lower()}",
        f"rollout.quantization={case.quantization}",
        f"rollout.weight_transport={case.transport}",
        f"train.run_dir={case.folder.parent / 'run'}",
        *(MTP if case.also else [f"train.export_quantization={case.quantization}"]),
        *([f"rollout.quantization_ignore=['{case.ignored}']"] if case.ignored else []),
        "rollout.enable_sleep_mode=true",
        "train.offload=all",
        "rollout.update_weights_bucket_megabytes=3",  # several buckets for each channel
    )


def push_quantized(
    rank: int, dims: ParallelDims, case: Case, engines: WorkerEngines, folder: Path
) -> list[list[Held]]:
    """Push after an optimizer step; rank 0 returns [engine][worker].

    All state is away when the push begins, as when it replaces an engine lost while it generates.
    """
    policy, groups, client, cfg = start(rank, dims, case, engines)
    export_model(folder / "before", policy, cfg, groups)
    step(policy)
    residency = build_residency(cfg, policy, None, CPU, dims.world_size)
    residency.enter("generate")
    assert "weights" in residency.away
    with closing(start_sync(policy, groups, client, cfg, residency)) as sync:
        if rank == 0:
            client.workers.call(begin_quantized, case, cfg)
        sync.push(lambda: pushed_weights(policy, cfg, groups), 1, PhaseTimer(lambda name: None))
        export_model(folder / "after", policy, cfg, groups, residency)
        dist.barrier()
        return client.workers.call(compare_quantized, folder) if rank == 0 else []


def failing_push(
    rank: int, dims: ParallelDims, case: Case, engines: WorkerEngines, fault: str
) -> str:
    """The error of a push with a flipped bit in each buffer, or a wrong scale in each worker."""
    flip_bits(10**6 if fault == "bit" else 0)
    policy, groups, client, cfg = start(rank, dims, case, engines)
    with closing(start_sync(policy, groups, client, cfg)) as sync:
        if rank == 0:
            client.workers.call(begin_quantized, case, cfg)
            if fault == "scale":
                client.workers.call(receive_wrong_scale)
        try:
            sync.push(lambda: pushed_weights(policy, cfg, groups), 1, PhaseTimer(lambda name: None))
        except ConnectionError as failure:
            return str(failure)
    return ""


def start(
    rank: int, dims: ParallelDims, case: Case, engines: WorkerEngines
) -> tuple[Policy, Groups, WorkerClient, Config]:
    setup_device(rank)
    client = WorkerClient(engines)
    cfg, groups = config_of(case, dims, client), init_groups(dims)
    return build_policy(cfg, trained_shape(cfg), groups), groups, client, cfg


def start_sync(
    policy: Policy,
    groups: Groups,
    client: WorkerClient,
    cfg: Config,
    residency: Residency = EVERYTHING_STAYS,
) -> WeightSync:
    sender = pushed_sender(policy, weight_sender(policy, groups), cfg, groups)
    source: Any = client if groups.rank == 0 else None
    return WeightSync(cfg, policy.shape, sender, CPU, 1, source, residency)


def step(policy: Policy) -> None:
    """Take an optimizer step with gradients that are equal on all ranks of a parameter."""
    policy.zero_grad()
    drafter = [] if policy.mtp is None else [policy.mtp.module]
    for module in (*policy.chunks, *drafter):
        for name, parameter in module.named_parameters():
            generator = torch.Generator().manual_seed(crc32(name.encode()))
            parameter.main_grad.normal_(generator=generator)
    for optimizer in chained_optimizers(policy):
        assert optimizer.step()[0]


def begin_quantized(process: WorkerProcess, case: Case, cfg: Config) -> None:
    process.case = case
    process.arguments = quantizing_arguments(cfg.model, cfg.rollout, {})
    process.worker = worker_of(process, case.folder, process.arguments)
    held = everything(process.worker)
    process.before = {name: value.detach().clone() for name, value in held.items()}


def worker_of(process: WorkerProcess, folder: Path, arguments: Any) -> Any:
    case = process.case
    return start_worker(
        process.rank,
        folder,
        case.engine,
        "bfloat16",
        case.also,
        **{"load_format": "hf"} | arguments,
    )


def everything(worker: Any) -> dict[str, torch.Tensor]:
    """Parameters that pushes fill, and those that vLLM derives from them (`ABSORBED`)."""
    made = {name: v for name, v in parameters_of(worker).items() if name.endswith(ABSORBED)}
    return worker.push_worker.weights() | made


def compare_quantized(process: WorkerProcess, folder: Path) -> Held:
    arguments = process.arguments if process.case.also else {}
    before, after = (
        everything(worker_of(process, folder / name, arguments)) for name in ("before", "after")
    )
    model = process.worker.get_model()
    held, own = everything(process.worker), process.worker.push_worker.weights()
    small = {name: value for name, value in own.items() if value.itemsize == 1}
    scales = {n: v for n, v in own.items() if "_scale" in n}
    changed = differing(held, before)
    transfer = process.worker.push_worker
    return Held(
        loaded=differing(process.before, before),
        differing=differing(held, after)
        + [n for n in held if (n in small or n not in own) and n not in changed],
        bytes_received=getattr(transfer._receiver, "bytes_received", None),
        share=sum(v.nbytes for v in (*small.values(), *scales.values()))
        / sum(2 * v.numel() for v in small.values()),
        bytes_held=sum(v.nbytes for v in own.values()) - padding_bytes(process.worker),
        error=product_error(model, own),
    )


def product_error(model: Any, held: dict[str, torch.Tensor]) -> float:
    ends = ("qkv_proj.weight", "q_b_proj.weight")
    name = next(name for name in held if ".layers.1." in name and name.endswith(ends))
    x = torch.randn(5, held[name].shape[1], generator=torch.Generator().manual_seed(0)).bfloat16()
    found, _ = model.get_submodule(name.removesuffix(".weight"))(x)
    [scales] = [value for other, value in held.items() if other.startswith(f"{name}_scale")]
    rows, columns = (n // m for n, m in zip(held[name].shape, scales.shape, strict=True))
    whole = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    expected = x.float() @ (held[name].float() * whole).T
    if (bias := held.get(f"{name.removesuffix('weight')}bias")) is not None:
        expected += bias.float()
    return float((found.float() - expected).abs().max() / expected.abs().max())


def receive_wrong_scale(process: WorkerProcess) -> None:
    """Change a scale after each later push, before checksums are taken."""
    transfer = process.worker.push_worker
    mark_loaded = transfer.state.mark_loaded

    def wrong(sums: dict[str, int]) -> None:
        from parallel.checksum import checksums

        parameters = pushable_parameters(transfer.model)
        name = next(n for n in parameters if "layers.1.mlp.down_proj.weight_scale" in n)
        parameters[name].data[0, 0] *= 2
        mark_loaded(sums | checksums({name: parameters[name]}))

    transfer.state.mark_loaded = wrong
