"""Values of weights as raw bits: numpy arrays with an unsigned integer for each element.

numpy has no bfloat16, and code that copies weights need not know their dtype. Nothing here needs
torch, which takes a second to import. Dtypes are named as in safetensors.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

RawBits = NDArray[Any]
"""Unsigned integers, one for each element."""
BIT_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<u8"),
    "F32": np.dtype("<u4"),
    "F16": np.dtype("<u2"),
    "BF16": np.dtype("<u2"),
}
LARGEST = {
    "F64": float(np.finfo("f8").max),
    "F32": float(np.finfo("f4").max),
    "F16": float(np.finfo("f2").max),
    "BF16": (2 - 2**-7) * 2.0**127,
}
"""The largest finite value of each dtype."""
_FLOATS: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
}
_NAN = 0x7FC0  # in bfloat16


def floats(bits: RawBits, dtype: str) -> NDArray[Any]:
    """The values of raw bits as floating-point numbers; exact (bfloat16 becomes float32)."""
    if dtype == "BF16":
        return (bits.astype("<u4") << 16).view("<f4")
    return bits.view(_FLOATS[dtype])


def converted(bits: RawBits, dtype: str, wanted: str) -> RawBits:
    """The raw bits of the same values in another dtype, rounded to nearest as torch does.

    Values beyond the range of `wanted` become infinite.
    """
    if dtype == wanted:
        return bits
    values = floats(bits, dtype)
    with np.errstate(over="ignore"):
        if wanted != "F64":  # torch converts to the 16-bit dtypes by way of float32
            values = values.astype("<f4")
        if wanted == "BF16":
            return _rounded(values.view("<u4"))
        return values.astype(_FLOATS[wanted]).view(BIT_DTYPES[wanted])


def _rounded(bits: RawBits) -> RawBits:
    """float32 bits to bfloat16, which is their upper half, rounded half to even."""
    rounded = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16
    rounded[(bits & 0x7FFFFFFF) > 0x7F800000] = _NAN
    return rounded.astype("<u2")
