"""Where this process computes: device, communication backend, and what Megatron-Core needs on CPU.

Megatron-Core asks ``torch.cuda`` for its device, its random states and its synchronisation. On a
machine without CUDA `setup_device` answers those calls for the CPU, and the same model, schedules
and optimizer run over gloo. With CUDA nothing here is patched.
"""

import os
from collections.abc import Callable, Iterable
from functools import cache
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
    _install_cpu_runtime()
    return torch.device("cpu")


def attention_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type to compute torch's attention in when the model's is `dtype`.

    float32 on the CPU: there the backward in bfloat16 takes three times as long on sequences of
    tens of tokens, and as long on hundreds.
    """
    return dtype if torch.cuda.is_available() else torch.promote_types(dtype, torch.float32)


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
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs = kwargs | {"device": "cpu"}
        return func(*args, **kwargs)


@cache
def _install_cpu_runtime() -> None:
    """Answer for CUDA in this process, for the rest of its life."""
    answers: dict[str, Callable[..., Any]] = {
        "current_device": lambda: "cpu",
        "synchronize": lambda device=None: None,
        "current_stream": lambda device=None: None,  # megatron-core 0.19 asks, for nothing
        "manual_seed": torch.default_generator.manual_seed,
        "get_rng_state": lambda device="cuda": torch.get_rng_state(),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    megatron_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    _CudaMeansCpu().__enter__()
