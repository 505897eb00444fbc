"""Direct calls of the CUDA driver, for functions that torch does not expose."""

import ctypes
from collections.abc import Callable
from typing import Any

import torch


def call_driver(device: torch.device, name: str, *arguments: Any) -> None:
    """Call a function of the driver in torch's context on `device`; RuntimeError with its text."""
    driver = ctypes.CDLL("libcuda.so.1")
    with torch.cuda.device(device):
        # A thread has no CUDA context before its first runtime call; this one does not block.
        torch.cuda.current_stream().query()
        function: Callable[..., int] = getattr(driver, name)
        code = function(*arguments)
    if code:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(code, ctypes.byref(text))
        said = (text.value or b"unknown").decode()
        raise RuntimeError(f"{name}: {said} (CUDA driver error {code})")
