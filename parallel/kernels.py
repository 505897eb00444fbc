"""The C of this package, as it was compiled when the package was installed."""

import ctypes
import sysconfig
from pathlib import Path


def load_kernel(name: str) -> ctypes.CDLL:
    """The library of `name`.c; other threads may use Python while a function of it runs.

    Raises ImportError when there is none.
    """
    path = Path(__file__).with_name(name + sysconfig.get_config_var("EXT_SUFFIX"))
    if not path.exists():
        raise ImportError(f"{path} is missing: `make setup` builds it")
    return ctypes.CDLL(str(path))
