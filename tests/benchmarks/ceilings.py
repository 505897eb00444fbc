"""What this machine can do at most, beside which figures are to be seen."""

import json
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from best_time import best_time

COPY_BYTES = 1 << 28
DISK_BYTES = 1 << 28
GEMM = (512, 1024, 8192)  # rows, inner, columns


def measure_ceilings(num_threads: int) -> dict[str, float]:
    """The best of five, in a process of its own: in GB/s, or GFLOP/s for matrix products."""
    environ = os.environ | {"OMP_NUM_THREADS": str(num_threads)}
    command = [sys.executable, __file__]
    done = subprocess.run(command, env=environ, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    """Print all as JSON."""
    found = {
        "memcpy": COPY_BYTES / best_time(_copy()),
        "GEMM float32": _flops() / best_time(_product(torch.float32)),
        "GEMM bfloat16": _flops() / best_time(_product(torch.bfloat16)),
    }
    with TemporaryDirectory(dir=Path.cwd(), prefix=".ceiling-") as folder:
        file = Path(folder) / "file"
        found["disk write"] = DISK_BYTES / best_time(lambda: _write(file), 3)
        found["disk read"] = DISK_BYTES / best_time(lambda: _read(file), 3)
    print(json.dumps({name: rate / 1e9 for name, rate in found.items()}))


def _copy() -> Callable[[], object]:
    source, target = torch.ones(2, COPY_BYTES, dtype=torch.uint8)
    return lambda: target.copy_(source)


def _product(dtype: torch.dtype) -> Callable[[], object]:
    rows, inner, columns = GEMM
    left, right = torch.randn(rows, inner).to(dtype), torch.randn(columns, inner).to(dtype)
    return lambda: left @ right.T


def _flops() -> float:
    rows, inner, columns = GEMM
    return 2.0 * rows * inner * columns


def _write(path: Path) -> None:
    with path.open("wb") as file:
        file.write(bytes(DISK_BYTES))
        os.fsync(file.fileno())


def _read(path: Path) -> None:
    """Past the page cache."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    with mmap.mmap(-1, 1 << 24) as block:
        while os.readv(descriptor, [block]):
            pass
    os.close(descriptor)


if __name__ == "__main__":
    main()
