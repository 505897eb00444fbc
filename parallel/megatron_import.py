"""Megatron-Core, imported without what this project makes no use of: a third of a rank's start."""

import sys
from collections.abc import Callable
from typing import Any

import torch


def import_megatron() -> None:
    """Import Megatron-Core; to be called before anything else does.

    While it is imported it hands its fused functions to `torch.compile`, for which torch loads its
    compiler at once: of no use without CUDA, where they run as they are. It also looks for wandb,
    for an inference engine of its own. Both together take 3.5 of the 10 seconds of CPU time in
    which a rank starts.
    """
    compiled = torch.compile
    if not torch.cuda.is_available():
        torch.compile = _as_it_is  # type: ignore[assignment]
    sys.modules.setdefault("wandb", None)  # type: ignore[arg-type]
    try:
        import megatron.core  # noqa: F401, PLC0415 - see above
    finally:
        torch.compile = compiled
        if not sys.modules["wandb"]:
            del sys.modules["wandb"]


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function
