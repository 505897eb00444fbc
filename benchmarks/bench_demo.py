"""Seconds per phase and tokens/s of the demo config: `make bench`, or with overrides.

    python benchmarks/bench_demo.py parallel.tensor_parallel_size=3

Runs five steps in a temporary folder and reports the median, minimum and maximum of the last four:
the first step also fills caches and runs lazy imports. Wall-clock times hold for this machine only.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

CONFIG = "configs/demo_smollm2_135m.yaml"
NUM_STEPS, NUM_WARMUP_STEPS = 5, 1


def main() -> None:
    with tempfile.TemporaryDirectory() as run_dir:
        start = time.monotonic()
        command = [sys.executable, "-m", "megatron_grpo", "train", CONFIG]
        command += [f"train.num_steps={NUM_STEPS}", f"train.run_dir={run_dir}", *sys.argv[1:]]
        subprocess.run(command, check=True)
        total = time.monotonic() - start
        lines = (Path(run_dir) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    steady = records[NUM_WARMUP_STEPS:]
    in_steps = sum(record["time/step"] for record in records)
    print(f"\n{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} at the end")
    print(f"{'':24}{'median':>10}{'least':>10}{'largest':>10}")
    for name in [name for name in steady[0] if name.startswith("time/")] + ["tokens_per_second"]:
        values = [record[name] for record in steady]
        unit = " s" if name.startswith("time/") else ""
        print(f"{name + unit:24}{median(values):10.2f}{min(values):10.2f}{max(values):10.2f}")
    print(f"outside of steps (start, export, end): {total - in_steps:.1f} s")


if __name__ == "__main__":
    main()
