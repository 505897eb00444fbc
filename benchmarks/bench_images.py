"""Seconds to make the pixels of prompts: in threads, as ranks do, and in processes.

    PYTHONPATH=.:tests .venv/bin/python benchmarks/bench_images.py [IMAGES]

Prints wall-clock milliseconds for each of IMAGES (64) JPEG photographs of 1024 x 768 pixels, with
the image processors of Qwen2.5-VL and Qwen3-VL and with one and two workers: for its pixels alone,
and with the request to an engine, which has them as base64. Processes have imported the processor
before, and send their results to the calling process.
"""

import json
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from io import BytesIO
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from PIL import Image

from helpers.models.images import IMAGE_LIMITS, tiny_vision_model
from helpers.oracle.policies import tiny_config
from megatron_grpo.data.images import ImageReader, ImageSource, PromptSources
from megatron_grpo.engines.request import image_features
from parallel import ParallelDims

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
WIDTH, HEIGHT = 1024, 768
LEAST, MOST = 56 * 56, 28 * 28 * 1280
"""Least and largest number of pixels of an image."""
REPEATS = 3


def photographs(count: int) -> list[bytes]:
    """Smooth colours with some noise, which decode like photographs of about the same bytes."""
    generator = np.random.default_rng(0)
    files = []
    for _ in range(count):
        coarse = Image.fromarray(generator.integers(0, 256, (24, 32, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), dtype=float)
        noisy = (smooth + generator.normal(0, 6, smooth.shape)).clip(0, 255).astype(np.uint8)
        file = BytesIO()
        Image.fromarray(noisy).save(file, "JPEG", quality=90)
        files.append(file.getvalue())
    return files


def image_reader(folder: Path, family: str) -> ImageReader:
    """A model's image processor that leaves photographs at their size."""
    file = tiny_vision_model(folder, family) / "preprocessor_config.json"
    size = {"shortest_edge": LEAST, "longest_edge": MOST}
    sizes = {"min_pixels": LEAST, "max_pixels": MOST, "size": size}  # processors use either name
    file.write_text(
        json.dumps(json.loads(file.read_text(encoding="utf-8")) | sizes), encoding="utf-8"
    )
    limits = f"rollout.vllm={json.dumps(IMAGE_LIMITS)}"
    return ImageReader(tiny_config(folder, ParallelDims(), "rollout.engine=vllm", limits))


def pixels(sources: PromptSources) -> Any:
    return sources.read()


def request(sources: PromptSources) -> Any:
    return image_features(sources.read())


def start_worker() -> None:
    torch.set_num_threads(1)


def milliseconds(
    pool: Executor, work: Callable[[PromptSources], Any], prompts: Iterable[PromptSources]
) -> float:
    prompts, times = [*prompts], []
    list(pool.map(work, prompts[: 2 * len(FAMILIES)]))  # imports, and each worker's first image
    for _ in range(REPEATS):
        start = time.perf_counter()
        list(pool.map(work, prompts))
        times.append(time.perf_counter() - start)
    return 1000 * min(times) / len(prompts)


def main() -> None:
    torch.set_num_threads(1)
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 64
    files = photographs(count)
    print(f"{count} JPEG files of {sum(map(len, files)) / count / 1e3:.0f} kB on average")
    for family in FAMILIES:
        with TemporaryDirectory() as folder:
            reader = image_reader(Path(folder) / "model", family)
            prompts = []
            for number, file in enumerate(files):
                made = reader.expand([reader.token_id], [ImageSource(f"image {number}", file)])
                assert isinstance(made, tuple) and len(made[0]) > 700, made
                prompts.append(made[1])
            for workers in 1, 2:
                pools: dict[str, Executor] = {
                    "threads": ThreadPoolExecutor(workers),
                    "processes": ProcessPoolExecutor(
                        workers, get_context("forkserver"), start_worker
                    ),
                }
                for name, pool in pools.items():
                    with pool:
                        pixel_time, request_time = (
                            milliseconds(pool, work, prompts) for work in (pixels, request)
                        )
                    print(f"{family}, {workers} {name}: {pixel_time:.1f} ms, {request_time:.1f} ms")


if __name__ == "__main__":
    main()
