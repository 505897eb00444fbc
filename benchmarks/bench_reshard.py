"""A push of a 0.5B model against a raw copy, and against gather-then-load: `make bench-reshard`.

    python benchmarks/bench_reshard.py [--rounds 5] [--bucket-megabytes 512]

Four ranks that hold a random model of Qwen2.5-0.5B's shape (bf16, 0.99 GB) as TP2 x PP2 push it
into the two workers of a vLLM engine, over shared memory and over the network (here loopback). The
seconds are those of the whole verified push. "Bare": a push without checksums, in turns with the
verified one; the difference is the cost of verification. "Raw": the same bytes over the same
channels in the same buckets, copied from one plain tensor into another; the speed of a bare push is
given as a fraction of the raw copy's. "Gather": whole tensors to rank 0, from there to every worker
through one file in memory or over the same network, and vLLM's own `load_weights` in the workers.
After every push, each parameter of the workers must be bitwise equal to the one that vLLM loaded at
first, and is then zeroed. Memory is the peak of a rank and of a worker above their use before the
channels were made; memory that two processes share counts in both.

Also prints what each worker receives at TP8 from vLLM's own backends, computed from configs alone.
"""

import argparse
import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from checkpoint_convert import ModelShape, hf_tensors, megatron_layout, read_shape
from checkpoint_convert.megatron import megatron_sender
from checkpoint_convert.vllm import EngineDims
from checkpoint_convert.weights import read_weights
from gather_then_load import by_file, by_network, gather_then_load
from helpers.engines.vllm_workers import (
    WorkerClient,
    WorkerEngines,
    WorkerProcess,
    parameters_of,
    worker_engines,
)
from helpers.models.conversions import bytes_of
from helpers.oracle.policies import tiny_config
from helpers.ranks.processes import run_ranks
from megatron_grpo.timing import PhaseTimer
from megatron_grpo.weight_sync import WeightSync
from parallel import ParallelDims
from raw_copy import plain_bytes, push_raw
from unverified import unverified

QWEN_0_5B = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "num_hidden_layers": 24,
    "hidden_size": 896,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151936,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "rope_theta": 1e6,
    "dtype": "bfloat16",
}
RANKS, ENGINE = ParallelDims(tensor=2, pipeline=2), EngineDims(tensor=2)
TRANSPORTS = {"memory": "auto", "network": "network"}

KINDS = ("", " bare", " raw", " gather")

Figures = dict[str, list[float]]
"""One value per round, by name."""


def main() -> None:
    """Run all measurements and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="counted ones; one more warms up")
    parser.add_argument("--bucket-megabytes", type=int, default=512, help="buffers per process")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="bench-") as name:
        folder = Path(name)
        shape = write_model(folder / "model")
        with worker_engines(1, ENGINE.tensor, folder, timeout=1800) as engines:
            ranks = run_ranks(
                RANKS.world_size,
                measure,
                folder,
                engines,
                arguments.rounds,
                arguments.bucket_megabytes,
                timeout=1800,
            )
    report(ranks, sum(2 * torch.Size(size).numel() for size in hf_tensors(shape).values()))


def write_model(folder: Path) -> ModelShape:
    """Write a random model of Qwen2.5-0.5B's shape."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN_0_5B), encoding="utf-8")
    shape = read_shape(folder)
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.empty(size, dtype=torch.bfloat16).normal_(generator=generator)
        for name, size in hf_tensors(shape).items()
    }
    save_file(weights, folder / "model.safetensors")
    return shape


def measure(
    rank: int, folder: Path, engines: WorkerEngines, num_rounds: int, megabytes: int
) -> Figures:
    """All seconds and memory, on one rank; the first round only warms up."""
    model = folder / "model"
    shape = read_shape(model)
    layouts = [
        megatron_layout(shape, RANKS, RANKS.coordinates(other), transformer_engine=False)
        for other in range(RANKS.world_size)
    ]
    parameters = {n: torch.empty(s, dtype=torch.bfloat16) for n, s in layouts[rank].shapes.items()}
    read_weights(model, shape, layouts[rank], parameters)
    if rank == 0:
        engines.call(start, model)
    plain = plain_bytes(parameters)
    figures: Figures = defaultdict(list)
    for name, transport in TRANSPORTS.items():
        with (
            watched(rank, engines, figures, name),
            closing(weight_sync(rank, model, engines, transport, megabytes)) as sync,
        ):
            for number in range(num_rounds + 1):
                kinds = [(name, nullcontext()), (f"{name} bare", unverified(rank, engines))]
                for kind, way in kinds if number % 2 else reversed(kinds):
                    with way:
                        figures[kind].append(push(sync, parameters))
                    check(rank, engines)
                with timed(figures, f"{name} raw"):
                    push_raw(sync, rank, plain, engines)
    for name, deliver in {
        "memory gather": partial(by_file, file=folder / "whole", engines=engines),
        "network gather": partial(by_network, shape=shape, engines=engines),
    }.items():
        with watched(rank, engines, figures, name):
            for _ in range(num_rounds + 1):
                with timed(figures, name):
                    gather_then_load(shape, layouts, parameters, deliver)
                check(rank, engines)
    return {name: values[-num_rounds:] for name, values in figures.items()}


def weight_sync(
    rank: int, model: Path, engines: WorkerEngines, transport: str, megabytes: int
) -> WeightSync:
    """The `WeightSync` of a trainer."""
    cfg = tiny_config(
        model,
        RANKS,
        "model.dtype=bfloat16",
        f"rollout.base_urls=[{', '.join(engines.base_urls)}]",
        f"rollout.tensor_parallel_size={ENGINE.tensor}",
        f"rollout.weight_transport={transport}",
        f"rollout.update_weights_bucket_megabytes={megabytes}",
    )
    shape, place = read_shape(model), RANKS.coordinates(rank)
    sender = megatron_sender(shape, RANKS, place, transformer_engine=False)
    client: Any = WorkerClient(engines) if rank == 0 else None
    return WeightSync(cfg, shape, sender, torch.device("cpu"), 1, client)


def push(sync: WeightSync, parameters: Mapping[str, Tensor]) -> float:
    """Seconds of one push as a trainer does it; the first push makes the channels."""
    dist.barrier()
    timer = PhaseTimer(lambda name: None)
    sync.push(lambda: parameters, 1, timer)
    seconds = timer.metrics()
    return seconds["time/push"] + seconds["time/verify_weights"]


def start(process: WorkerProcess, model: Path) -> None:
    """Let vLLM load the model, keep a copy of its parameters, and zero them."""
    process.serve(model, ENGINE, "bfloat16")
    process.before = {k: v.clone() for k, v in parameters_of(process.worker).items()}
    process.plain = plain_bytes(process.before)
    compare_and_wipe(process)


def check(rank: int, engines: WorkerEngines) -> None:
    """Fail unless all workers hold the parameters that vLLM loaded at first; zeroes them."""
    if rank == 0:
        [differing] = engines.call(compare_and_wipe)
        assert not any(differing), differing
    dist.barrier()


def compare_and_wipe(process: WorkerProcess) -> list[str]:
    """Names of parameters that differ from those that vLLM loaded; zeroes all parameters."""
    held = parameters_of(process.worker)
    differing = [
        name
        for name, value in process.before.items()
        if not torch.equal(bytes_of(held[name]), bytes_of(value))
    ]
    with torch.inference_mode():
        for value in held.values():
            value.data.zero_()
    return differing


@contextmanager
def timed(figures: Figures, name: str) -> Iterator[None]:
    """Record the seconds of the block on this rank, after a barrier."""
    dist.barrier()
    start = time.perf_counter()
    yield
    figures[name].append(time.perf_counter() - start)


@contextmanager
def watched(rank: int, engines: WorkerEngines, figures: Figures, name: str) -> Iterator[None]:
    """Record the peak of memory above its start, for this rank and, on rank 0, for the workers."""
    before = resident_bytes(peak=False)
    if rank == 0:
        before_workers = engines.call(forget_peak)
    dist.barrier()
    forget_peak(None)
    yield
    figures[f"{name} rank memory"].append(resident_bytes(peak=True) - before)
    if rank == 0:
        [peaks] = engines.call(peak_of)
        figures[f"{name} worker memory"] += [
            after - before for after, before in zip(peaks, before_workers[0], strict=True)
        ]


def forget_peak(process: WorkerProcess | None) -> int:
    """Reset the peak of this process's memory; returns its current bytes."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return resident_bytes(peak=False)


def peak_of(process: WorkerProcess) -> int:
    """Peak bytes of this process since `forget_peak`; closes its channels."""
    process.worker.push_worker.close()
    return resident_bytes(peak=True)


def resident_bytes(*, peak: bool) -> int:
    """Memory of this process, including shared memory: now, or the peak since `forget_peak`."""
    field = "VmHWM" if peak else "VmRSS"
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


def report(ranks: list[Figures], num_bytes: int) -> None:
    """Print the times of rank 0, and the largest memory of any rank and of any worker."""
    figures = ranks[0]
    cores, load = os.cpu_count(), os.getloadavg()[0]
    print(f"\n{cores} cores, load average {load:.1f}; {num_bytes / 1e9:.2f} GB")
    print(f"{'':16}{'seconds':>20}{'GB/s':>8}{'memory':>20}")
    for name in (f"{transport}{kind}" for transport in TRANSPORTS for kind in KINDS):
        seconds = figures[name]
        line = f"{name:16}{spread(seconds):>20}{num_bytes / 1e9 / median(seconds):8.1f}"
        if f"{name} rank memory" in figures:
            rank = max(max(each[f"{name} rank memory"]) for each in ranks)
            worker = max(figures[f"{name} worker memory"])
            line += f"{rank / 1e6:10.0f} + {worker / 1e6:.0f} MB"
        print(line)
    for name in TRANSPORTS:
        whole, bare, raw, gather = (figures[f"{name}{kind}"] for kind in KINDS)
        percent = [100 * (a - b) / a for a, b in zip(whole, bare, strict=True)]
        print(
            f"{name}: verification {spread(percent, 0)} % of a push; without it "
            f"{ratios(raw, bare)} of the speed of the raw copy; gathering and loading takes "
            f"{ratios(gather, whole)} times the seconds of a push"
        )


def ratios(over: list[float], under: list[float]) -> str:
    """The spread of the ratios, round by round."""
    return spread([a / b for a, b in zip(over, under, strict=True)])


def spread(values: list[float], digits: int = 2) -> str:
    """Median, minimum and maximum."""
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


if __name__ == "__main__":
    main()
