"""Seconds until `megatron-grpo view` shows a step of a run of a million completions (a gigabyte).

    .venv/bin/python benchmarks/bench_view.py

Prints the seconds from the start of the command to the answers to the page's first requests: the
page, all metrics, and the completions of a step. The file was just written, so it is cached.
"""

import json
import random
import socket
import subprocess
import sys
import time
from http.client import HTTPConnection
from pathlib import Path
from tempfile import TemporaryDirectory

COMPLETIONS, PER_STEP = 1_000_000, 256
STEPS = COMPLETIONS // PER_STEP


def write_run(run_dir: Path) -> int:
    """Write a run with completions of 200 to 1000 characters; returns the bytes of their file."""
    chance = random.Random(0)
    text = " ".join(str(chance.randrange(1000)) for _ in range(5000))
    with (run_dir / "completions.jsonl").open("w", encoding="utf-8") as file:
        for step in range(1, STEPS + 1):
            file.writelines(row(step, k, text, chance) for k in range(PER_STEP))
    with (run_dir / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for step in range(1, STEPS + 1):
            values = {f"metric/{k}": chance.random() for k in range(60)}
            file.write(json.dumps({"step": step, "reward": chance.random(), **values}) + "\n")
    return (run_dir / "completions.jsonl").stat().st_size


def row(step: int, k: int, text: str, chance: random.Random) -> str:
    start = chance.randrange(10_000)
    fields = {
        "step": step,
        "prompt_index": (step * PER_STEP + k) // 8,
        "sample_index": k % 8,
        "prompt": text[start : start + 150],
        "completion": text[start : start + 200 + chance.randrange(800)],
        "num_tokens": 200,
        "reward": 1.0,
        "rewards": {"exact": 1.0},
        "advantage": 0.5,
        "entropy": 0.3,
        "logprob_gap": 0.01,
        "finish_reason": "stop",
        "policy_version": step - 1,
    }
    return json.dumps(fields) + "\n"


def get(port: int, url: str) -> bytes:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", url)
    answer = connection.getresponse()
    assert answer.status == 200, url
    return answer.read()


def main() -> None:
    with TemporaryDirectory() as folder:
        run_dir = Path(folder)
        size = write_run(run_dir)
        print(f"{STEPS * PER_STEP:,} completions of {STEPS:,} steps, {size / 1e9:.2f} GB")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "megatron_grpo", "view", folder, f"--port={port}"]
        start = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE) as view:
            view.stdout.readline()
            step = STEPS * 2 // 3
            for what, url in {
                "the page": "/",
                "plotly.js": "/plotly.min.js",
                "all metrics": "/api/metrics?run=0&offset=0&step=-1",
                "the completions of a step": f"/api/completions?run=0&step={step}",
                "and of another": f"/api/completions?run=0&step={step // 2}",
                "the steps with a prompt": "/api/steps_of_prompt?run=0&prompt_index=77",
            }.items():
                num_bytes = len(get(port, url))
                print(f"{time.perf_counter() - start:6.2f} s  {what} ({num_bytes / 1e6:.2f} MB)")
            view.terminate()


if __name__ == "__main__":
    main()
