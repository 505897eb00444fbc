"""Stands in for SGLang's kernels on a machine without a GPU.

SGLang imports some of them there, and calls none with the settings of `engines/sglang/args.py`.
"""

from collections.abc import Callable
from typing import NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("_"):
        raise AttributeError(name)

    def kernel(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} needs a GPU")

    return kernel
