"""Imports Megatron-Core without parts that this project does not use: a rank starts faster."""

import os
import sys

import torch

UNUSED = ("wandb", "torch.utils.tensorboard")
"""Packages that Megatron-Core imports if installed, for its own inference engine and timers."""


def import_megatron() -> None:
    """Import Megatron-Core; call this before anything else imports it.

    Saves 4 of the 10 seconds of CPU time that a rank needs to start without CUDA.

    Raises ValueError if Transformer Engine, which Megatron-Core imports where it is installed, or
    another package does not work.
    """
    # With one hardware queue, communication that Megatron issues before computation also runs
    # first. The driver may read this when torch first asks for GPUs.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # On import, Megatron-Core passes its fused functions to `torch.compile`, which loads torch's
    # compiler. Without CUDA that is useless: the functions stay uncompiled.
    compiled = torch.compile
    if not torch.cuda.is_available():
        torch.compile = lambda function: function  # type: ignore
    # None makes `import` raise ModuleNotFoundError, as if the package were not installed.
    for name in UNUSED:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    try:
        import megatron.core  # noqa: F401, PLC0415 - see above
    # OSError: a library that does not match torch's; the last two: packages of Transformer Engine
    # that do not match each other.
    except (ImportError, OSError, AssertionError, RuntimeError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "megatron":
            raise ValueError(
                "Megatron-Core is not installed: run `make setup` (on GPUs: `bash "
                "requirements/gpu.sh`)"
            ) from None
        raise ValueError(
            f"Megatron-Core cannot be imported: {error}. Where Transformer Engine is installed, "
            "`python -c 'import torch, transformer_engine.pytorch'` must work: install it as "
            "requirements/gpu.sh does, or uninstall it"
        ) from error
    finally:
        torch.compile = compiled
        for name in UNUSED:
            if not sys.modules[name]:
                del sys.modules[name]
