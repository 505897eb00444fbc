"""Loads the C extensions of this package, which are compiled at installation."""

import ctypes
import sysconfig
from pathlib import Path


def load_kernel(name: str) -> ctypes.CDLL:
    """The compiled library of `name`.c; its functions run without the GIL.

    Raises ImportError if it was not built.
    """
    path = Path(__file__).with_name(name + sysconfig.get_config_var("EXT_SUFFIX"))
    if not path.exists():
        raise ImportError(f"{path} is missing: `make setup` builds it")
    return ctypes.CDLL(str(path))
