"""Device and communication backend of this process, and what Megatron-Core needs to run on CPU.

Megatron-Core calls ``torch.cuda`` for its device, random states and synchronisation. On a machine
without CUDA, `setup_device` redirects these calls to the CPU, so that the same model, schedules and
optimizer run over gloo. With CUDA, nothing is patched.
"""

import ctypes
import os
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from megatron.core.tensor_parallel import random as megatron_random
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.overrides import TorchFunctionMode

from parallel.words import counted


def communication_backend() -> str:
    """Backend for `torch.distributed.init_process_group`: NCCL for CUDA tensors, else gloo."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def setup_device(local_rank: int) -> torch.device:
    """Select the device of this process; without CUDA, install the CPU runtime (once).

    Call it before creating any process group or model. Raises ValueError if the process does not
    see a GPU for its local rank.
    """
    # Lets gloo connect two ranks when they first communicate. By default it connects all ranks of
    # each group: 2,867 connections of one rank in 1,024 (TP 8, PP 4), of which it uses dozens.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    if torch.cuda.is_available():
        if local_rank >= (num_devices := torch.cuda.device_count()):
            raise ValueError(
                f"rank {local_rank} of this host needs GPU {local_rank}, but sees "
                f"{counted(num_devices, 'GPU')}: start fewer ranks, or make all GPUs visible to "
                "each (srun: --gpus-per-node, not --gpus-per-task)"
            )
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    _install_cpu_runtime()
    return torch.device("cpu")


def run_near(device: torch.device) -> None:
    """Keep this thread, and threads and processes that it starts later, on cores near the GPU.

    The operating system would move the thread between sockets, which slows launches of GPU kernels.
    """
    gpu: Any = torch.cuda.get_device_properties(device)  # torch's stub lacks its address
    address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    if cores := cores_at(address) & os.sched_getaffinity(0):
        os.sched_setaffinity(0, cores)


def cores_at(address: str, devices: Path = Path("/sys/bus/pci/devices")) -> set[int]:
    """Cores of the NUMA node of a PCI device; empty if the operating system does not list them."""
    file = devices / address / "local_cpulist"
    if not file.exists():
        return set()
    cores: set[int] = set()
    for part in filter(
        None, file.read_text(encoding="utf-8").strip().split(",")
    ):  # such as 0-3,8-11
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores


# Experts receive varying numbers of tokens: add what collectives over gloo lack for that.


def _all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    **options: Any,
) -> Any:
    """`all_to_all_single` that also accepts split sizes as tensors."""

    def as_list(sizes: Any) -> Any:
        return sizes.tolist() if isinstance(sizes, Tensor) else sizes

    return distributed_c10d.all_to_all_single(
        output, input, as_list(output_split_sizes), as_list(input_split_sizes), **options
    )


def _all_gather(
    tensor_list: list[Tensor], tensor: Tensor, group: Any = None, **options: Any
) -> Any:
    """`all_gather` that also accepts tensors of unequal lengths."""
    sizes = [len(part) for part in tensor_list]
    if len(set(sizes)) == 1:
        return distributed_c10d.all_gather(tensor_list, tensor, group, **options)
    gathered = tensor.new_empty(sum(sizes), *tensor.shape[1:])
    # An all-to-all takes unequal lengths; each rank sends its tensor to all.
    copies = torch.cat([tensor] * len(sizes))
    _all_to_all_single(gathered, copies, sizes, [len(tensor)] * len(sizes), group=group)
    for part, values in zip(tensor_list, gathered.split(sizes), strict=True):
        part.copy_(values)
    return None


def _reduce_scatter(
    output: Tensor, input_list: list[Tensor], group: Any = None, **options: Any
) -> Any:
    """`reduce_scatter` (sum) that also accepts tensors of unequal lengths."""
    sizes = [len(part) for part in input_list]
    if len(set(sizes)) == 1:
        return distributed_c10d.reduce_scatter(output, input_list, group=group, **options)
    received = output.new_empty(len(sizes) * len(output), *output.shape[1:])
    own = [len(output)] * len(sizes)
    _all_to_all_single(received, torch.cat(input_list), own, sizes, group=group)
    output.copy_(received.view(len(sizes), *output.shape).sum(dim=0))
    return None


class _CudaMeansCpu(TorchFunctionMode):
    """Treat device "cuda" as "cpu" in every torch call, and name CPU tensor types as on CUDA.

    Costs about 1 microsecond per torch call, in this thread only.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.type and len(args) == 1 and not kwargs:
            # Megatron's optimizer sorts its parameters by this name.
            name: str = func(*args)
            return name.replace("torch.", "torch.cuda.", 1)
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs = kwargs | {"device": "cpu"}
        return func(*args, **kwargs)


class _Stream:
    """The only stream of a CPU: work is done when the call returns.

    A class, like torch's own, because libraries write `torch.cuda.Stream | None`. All instances are
    equal: a tensor is always on the current stream.
    """

    def __init__(self, device: object = None) -> None:
        """Accepts any device."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return hash(_Stream)

    def record_event(self) -> torch.cpu.Event:
        """An event that has already completed."""
        return torch.cpu.Event()

    def wait_stream(self, stream: object) -> None:
        """Returns at once: all work is done."""


@cache
def _install_cpu_runtime() -> None:
    """Redirect CUDA to the CPU in this process, for the rest of its life."""
    stream = _Stream()
    answers: dict[str, Callable[..., Any]] = {
        "current_device": lambda: "cpu",
        "synchronize": lambda device=None: None,
        "current_stream": lambda device=None: stream,
        "Stream": _Stream,
        "stream": nullcontext,
        "manual_seed": torch.default_generator.manual_seed,
        "get_rng_state": lambda device="cuda": torch.get_rng_state(),
        # The C library keeps freed tensors below 32 MiB in its heap until it is trimmed, as torch
        # keeps those of a GPU.
        "empty_cache": lambda: ctypes.CDLL(None).malloc_trim(0),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    # Not in the mode below, which is off in a backward within a backward (recomputation).
    collectives: dict[str, Callable[..., Any]] = {
        "all_to_all_single": _all_to_all_single,
        "all_gather": _all_gather,
        "reduce_scatter": _reduce_scatter,
    }
    for name, collective in collectives.items():
        setattr(torch.distributed, name, collective)
    megatron_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    _CudaMeansCpu().__enter__()
