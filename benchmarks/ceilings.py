"""Upper bounds of this machine's rates, to compare other figures with."""

import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from best_time import best_time
from warm_memory import IN_MEMORY, warm_memory

COPY_BYTES = 1 << 28
DISK_BYTES = 1 << 28
MEMORY_BYTES = 1 << 30
BLOCK = bytes(1 << 16)
GEMM = (512, 1024, 8192)  # rows, inner, columns


def measure_ceilings(num_threads: int) -> dict[str, float]:
    """The best rates in GB/s, or GFLOP/s for matrix products, measured in a separate process."""
    environ = os.environ | {"OMP_NUM_THREADS": str(num_threads)}
    command = [sys.executable, __file__]
    done = subprocess.run(
        command, env=environ, check=True, capture_output=True, text=True, encoding="utf-8"
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    """Measure all rates and print them as JSON."""
    found = {
        "memcpy": COPY_BYTES / best_time(_copy()),
        "GEMM float32": _flops() / best_time(_product(torch.float32)),
        "GEMM bfloat16": _flops() / best_time(_product(torch.bfloat16)),
    }
    found["memory file write"] = MEMORY_BYTES / _write_to_memory(torch.get_num_threads())
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


def _write_to_memory(num_threads: int) -> float:
    """Seconds in which `num_threads` threads write a new file each in /dev/shm; best of five."""

    def write(path: Path) -> None:
        with path.open("wb", buffering=0) as file:
            for _ in range(MEMORY_BYTES // num_threads // len(BLOCK)):
                file.write(BLOCK)

    warm_memory(2 * MEMORY_BYTES)
    seconds = []
    with ThreadPoolExecutor(num_threads) as pool:
        for _ in range(5):
            with TemporaryDirectory(dir=IN_MEMORY, prefix="ceiling-") as folder:
                start = time.perf_counter()
                list(pool.map(write, (Path(folder) / str(i) for i in range(num_threads))))
                seconds.append(time.perf_counter() - start)
    return min(seconds)


def _write(path: Path) -> None:
    with path.open("wb") as file:
        file.write(bytes(DISK_BYTES))
        os.fsync(file.fileno())


def _read(path: Path) -> None:
    """Read a file, bypassing the page cache."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    with mmap.mmap(-1, 1 << 24) as block:
        while os.readv(descriptor, [block]):
            pass
    os.close(descriptor)


if __name__ == "__main__":
    main()
