"""Loads the C extension of this package, which is compiled at installation."""

import ctypes
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any


def load_kernel(name: str, function: str, *argument_types: Any) -> Callable[..., None]:
    """A function of the compiled library of `name`.c; it runs without the GIL.

    Raises ImportError if it was not built.
    """
    path = Path(__file__).with_name(name + sysconfig.get_config_var("EXT_SUFFIX"))
    if not path.exists():
        raise ImportError(f"{path} is missing: `make setup` builds it")
    kernel = getattr(ctypes.CDLL(str(path)), function)
    kernel.argtypes, kernel.restype = argument_types, None
    loaded: Callable[..., None] = kernel
    return loaded
