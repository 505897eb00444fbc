"""Where this process computes: device, communication backend, and what Megatron-Core needs on CPU.

Megatron-Core asks ``torch.cuda`` for its device, its random states and its synchronisation. On a
machine without CUDA `setup_device` answers those calls for the CPU, and the same model, schedules
and optimizer run over gloo. With CUDA nothing here is patched.
"""

import os
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core.tensor_parallel import random as megatron_random
from torch.overrides import TorchFunctionMode


def communication_backend() -> str:
    """Backend for `torch.distributed.init_process_group`: NCCL for CUDA tensors, else gloo."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def setup_device(local_rank: int) -> torch.device:
    """Select the device of this process; without CUDA, install the CPU runtime (once).

    Call it before any process group or model is made.
    """
    if torch.cuda.is_available():
        # Megatron's tensor-parallel layers order communication before computation by issuing both
        # to one hardware queue; the driver reads this when the context is made.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    if not isinstance(torch.cuda.current_device, _Answer):
        _install_cpu_runtime()
    return torch.device("cpu")


def attention_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type to compute torch's attention in when the model's is `dtype`.

    float32 on the CPU: there the backward in bfloat16 takes three times as long on sequences of
    tens of tokens, and as long on hundreds.
    """
    return dtype if torch.cuda.is_available() else torch.promote_types(dtype, torch.float32)


class _Answer:
    """A constant stand-in for a function of ``torch.cuda``."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.value


class _IdleStream:
    """Stands for a CUDA stream or event: on the CPU everything is already in order."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def record_event(self, event: object = None) -> object:
        return event

    def record(self, stream: object = None) -> None: ...

    def wait(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...


class _CudaMeansCpu(TorchFunctionMode):
    """Read device "cuda" as "cpu" in every torch call, and name CPU tensor types as if on CUDA.

    It costs about 1 microsecond per torch call, of this thread only.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # The optimizer sorts its parameters by this name.
            name: str = func(*args)
            return name.replace("torch.", "torch.cuda.", 1)
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs = kwargs | {"device": "cpu"}
        elif func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], "cpu", *args[2:])
        return func(*args, **kwargs)


def _is_cuda(device: object) -> bool:
    return isinstance(device, str | torch.device) and str(device).startswith("cuda")


def _install_cpu_runtime() -> None:
    no_op, stream = _Answer(None), _Answer(_IdleStream())
    answers = {
        "current_device": _Answer("cpu"),
        "synchronize": no_op,
        "empty_cache": no_op,
        "Stream": _IdleStream,
        "Event": _IdleStream,
        "stream": _Answer(nullcontext()),
        "current_stream": stream,
        "default_stream": stream,
        "manual_seed": torch.default_generator.manual_seed,
        "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    megatron_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    _CudaMeansCpu().__enter__()  # for the life of the process
