"""NCCL, called directly in the library that torch loaded. Python's other threads run meanwhile."""

import ctypes
from functools import cache


@cache
def library() -> ctypes.CDLL:
    """NCCL's functions; most return an ncclResult_t, which is 0 for success."""
    nccl = ctypes.CDLL("libnccl.so.2")
    nccl.ncclGetErrorString.restype = nccl.ncclGetLastError.restype = ctypes.c_char_p
    return nccl


def error_text(code: int) -> str:
    """What NCCL says of a result that is not 0, and of the last failure in this process."""
    kind: bytes = library().ncclGetErrorString(ctypes.c_int(code))
    last: bytes = library().ncclGetLastError(ctypes.c_void_p())
    return f"{kind.decode()}; last error: {last.decode()}"
