"""Import and export of a 1.5B model against a plain copy of the same bytes: `make bench-convert`.

    python benchmarks/bench_convert.py [FOLDER] [--pairs 5]

Makes a random model of Qwen2.5-1.5B's shape (bf16, 3 GB) in FOLDER (default: here, removed at the
end) and runs in turn: `cp` and `sync`; `checkpoint-convert import --tp 2`; `cp` and `sync` of the
checkpoint; `checkpoint-convert export`. Each runs as its own process and is timed from its start-up
until its bytes are on disk. "Cold": the source's pages were dropped from the page cache before. The
ratio is given for the whole process and for the time the command reports, which excludes the start
of Python. Memory is the peak of the sum over a run's processes, shared pages counted once (PSS); it
is sampled in a first, untimed round, since sampling slows a process down. At the end the exported
weights must equal the source bit for bit.

Also prints what an import of Llama-3.1-70B would need, from its config alone.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil
import torch
from safetensors.torch import save_file

from checkpoint_convert import hf_tensors, read_shape
from checkpoint_convert.hf_to_megatron import plan_import
from parallel import ParallelDims

QWEN_1_5B = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "num_hidden_layers": 28,
    "hidden_size": 1536,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 8960,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "rope_theta": 1e6,
    "dtype": "bfloat16",
}
LLAMA_70B = {
    "model_type": "llama",
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "vocab_size": 128256,
    "dtype": "bfloat16",
}
CONVERT = [sys.executable, "-m", "checkpoint_convert.cli"]
SHARD_BYTES = 10**9


@dataclass
class Run:
    """One timed process."""

    seconds: float
    own_seconds: float
    """The time that the command reports, without the start-up of Python and torch."""


def main() -> None:
    """Run all commands and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path.cwd())
    parser.add_argument("--pairs", type=int, default=5, help="counted rounds; one more warms up")
    arguments = parser.parse_args()
    print_plan()
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="bench-") as folder:
        measure(Path(folder), arguments.pairs)


def print_plan() -> None:
    """Print what an import of a 70B model needs, from its config.json."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LLAMA_70B), encoding="utf-8")
        shape = read_shape(folder)
        start = time.perf_counter()
        dims = ParallelDims(tensor=8, pipeline=4)
        plan = plan_import(shape, dims, dict.fromkeys(hf_tensors(shape), "BF16"))
        seconds = time.perf_counter() - start
    num_chunks = sum(len(file) for file in plan.files)
    print(
        f"Llama-3.1-70B, --tp 8 --pp 4: {plan.num_bytes / 1e9:.1f} GB in {num_chunks:,} chunks and "
        f"{len(plan.files)} files; planned in {seconds:.1f} s"
    )


def measure(folder: Path, num_pairs: int) -> None:
    """Time each command `num_pairs` times, cold and warm, after a round that measures memory."""
    source, copy, megatron, exported = (folder / n for n in ("hf", "copy", "megatron", "out"))
    write_model(source)
    commands = {
        "cp hf": (source, copy, ["cp", "-r", str(source), str(copy)]),
        "import": (
            source,
            megatron,
            [*CONVERT, "import", "--hf", str(source), "--out", str(megatron), "--tp", "2"],
        ),
        "cp megatron": (megatron, copy, ["cp", "-r", str(megatron), str(copy)]),
        "export": (
            megatron,
            exported,
            [*CONVERT, "export", "--megatron", str(megatron), "--out", str(exported)],
        ),
    }
    runs: dict[tuple[str, str], list[Run]] = {}
    peak_bytes: dict[tuple[str, str], int] = {}
    for round_number in range(num_pairs + 1):
        for cache in ("cold", "warm"):
            for name, (reads, writes, command) in commands.items():
                shutil.rmtree(writes, ignore_errors=True)
                settle(reads, cache)
                if round_number == 0:
                    peak_bytes[name, cache] = watched(command)
                else:
                    runs.setdefault((name, cache), []).append(timed(command, folder))
    subprocess.run([*CONVERT, "verify", str(source), str(exported)], check=True)
    report(runs, peak_bytes, sum(file.stat().st_size for file in source.glob("*.safetensors")))


def write_model(folder: Path) -> None:
    """Write a random model in files of about `SHARD_BYTES`."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN_1_5B), encoding="utf-8")
    generator = torch.Generator().manual_seed(0)
    weight_map, shard, number = {}, {}, 0
    shapes = hf_tensors(read_shape(folder))
    for i, (name, shape) in enumerate(shapes.items()):
        shard[name] = torch.empty(shape, dtype=torch.bfloat16).normal_(generator=generator)
        weight_map[name] = f"model-{number:05d}.safetensors"
        if sum(t.nbytes for t in shard.values()) > SHARD_BYTES or i == len(shapes) - 1:
            save_file(shard, folder / weight_map[name])
            shard, number = {}, number + 1
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def settle(folder: Path, cache: str) -> None:
    """Finish pending writes, and drop the folder's pages from the page cache or load them."""
    os.sync()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        with file.open("rb", buffering=0) as opened:
            if cache == "cold":
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while opened.read(1 << 24):
                    pass


def timed(command: list[str], folder: Path) -> Run:
    """Run a command until its output is on the disk."""
    start = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, encoding="utf-8")
    subprocess.run(["sync", "-f", str(folder)], check=True)
    seconds = time.perf_counter() - start
    said = re.search(r"after ([\d.]+) s", done.stdout)
    return Run(seconds, float(said[1]) if said else seconds)


def watched(command: list[str]) -> int:
    """Run a command and return the peak memory of it and its children, in bytes."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        peak_bytes = 0
        while process.poll() is None:
            peak_bytes = max(peak_bytes, resident_bytes(process.pid))
            time.sleep(0.05)
    assert process.returncode == 0, command
    return peak_bytes


def resident_bytes(pid: int) -> int:
    """Proportional set size of a process and its children, in bytes."""
    total = 0
    try:
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            total += process.memory_full_info().pss
    except psutil.NoSuchProcess:
        pass
    return total


def report(
    runs: dict[tuple[str, str], list[Run]], peak_bytes: dict[tuple[str, str], int], num_bytes: int
) -> None:
    """Print seconds, and the ratio of each conversion to the copy of the same round."""
    print(
        f"\n{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}; {num_bytes / 1e9:.2f} GB"
    )
    print(f"{'':18}{'seconds':>17}{'to cp':>18}{'without start-up, to cp':>27}{'memory':>11}")
    for (name, cache), some in runs.items():
        line = f"{name + ', ' + cache:18}{spread([run.seconds for run in some]):>17}"
        if not name.startswith("cp"):
            copies = runs["cp hf" if name == "import" else "cp megatron", cache]
            pairs = list(zip(some, copies, strict=True))
            line += f"{spread([run.seconds / copy.seconds for run, copy in pairs]):>18}"
            line += f"{spread([run.own_seconds / copy.seconds for run, copy in pairs]):>27}"
            line += f"{peak_bytes[name, cache] / 1e9:8.2f} GB"
        print(line)


def spread(values: list[float]) -> str:
    """Median, minimum and maximum."""
    return f"{median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


if __name__ == "__main__":
    main()
