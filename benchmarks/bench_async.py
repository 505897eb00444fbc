"""Seconds per step of a synchronous run, and of runs with generations ahead: `make bench-async`.

    python benchmarks/bench_async.py [--rounds 3] [--steps 16]

A random Qwen3 of 4 layers trains on one core, and one engine of vLLM generates on another. 64
completions per step end at random, after 64 tokens in the mean and 1,024 at most, so that a
generation ends with a few long ones. Runs take turns; of each, the seconds of a step without the
first four, in which the queue fills, and how much of them the ranks waited for the engine. At best
a step takes what the ranks compute in it, which is the same in all runs.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from statistics import median

from demo.make_kinds import write
from helpers.engines import running_engine
from helpers.jobs import Job
from helpers.models import tiny_model

FIRST = 4
SHAPE = {
    "hidden_size": 192,
    "num_hidden_layers": 4,
    "intermediate_size": 512,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,  # nearly uniform, so that an end token comes at a constant rate
}
END_TOKENS = [100, 120, 140]  # with the model's own, 4 of 250
COMMON = [
    "model.dtype=float32",
    "reward.functions=[demo/rewards.py:share_of_kind]",
    f"rollout.stop_token_ids={END_TOKENS}",
    "rollout.max_completion_length=1024",
    "grpo.generation_batch_size=64",
    "grpo.num_generations=8",
    "grpo.rollout_importance_sampling_mode=token_truncate",
    "optimizer.lr=1e-7",
    "train.save_interval=1000",
    "train.max_tokens_per_microbatch=8192",
    *[f"parallel.{axis}_parallel_size=1" for axis in ("tensor", "pipeline", "context")],
]
KINDS = {
    "max_staleness 0": [],
    "max_staleness 1": ["rollout.max_staleness=1"],
    "max_staleness 1, in flight": ["rollout.max_staleness=1", "rollout.in_flight_updates=true"],
    "max_staleness 4, in flight": ["rollout.max_staleness=4", "rollout.in_flight_updates=true"],
}


def seconds(run_dir: Path) -> tuple[float, float, float]:
    """Of a step in the mean: all, waiting for a generation, and the ranks' own."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()][FIRST:]

    def mean(name: str) -> float:
        return sum(record.get(f"time/{name}", 0.0) for record in records) / len(records)

    waits = "wait_rollout" if any("time/wait_rollout" in each for each in records) else "generate"
    own = sum(mean(name) for name in ("pack", "logprobs", "train", "push", "verify_weights"))
    return mean("step"), mean(waits), own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("override", nargs="*", help="key.sub=value of the config")
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    measured: dict[str, list[tuple[float, float, float]]] = {name: [] for name in KINDS}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = tiny_model(folder / "model", "qwen3", tied=True, **SHAPE)
        write(folder / "kinds.jsonl")
        os.sched_setaffinity(0, cores[:1])
        with running_engine("vllm", model, folder / "engine") as engine:
            os.sched_setaffinity(0, cores[1:2])
            for number in range(arguments.rounds):
                for name, keys in KINDS.items():
                    run_dir = folder / f"{number} {name}".replace(" ", "_").replace(",", "")
                    job = Job(
                        [
                            *COMMON,
                            *keys,
                            *arguments.override,
                            f"model.path={model}",
                            f"data.path={folder / 'kinds.jsonl'}",
                            f"train.run_dir={run_dir}",
                            f"train.num_steps={arguments.steps}",
                            f"rollout.base_urls=[{engine.servers.base_urls[0]}]",
                        ],
                        1,
                        folder / f"logs_{run_dir.name}",
                        token=engine.servers.token,
                    )
                    with job:
                        ended = job.end(600)
                    assert ended.exit_codes == [0], ended.output
                    measured[name].append(seconds(run_dir))
                    print(name, *(f"{each:.2f}" for each in measured[name][-1]), flush=True)
    print("| run | seconds per step | waiting for the engine | the ranks' own | speed |")
    print("|---|---|---|---|---|")
    first = None
    for name, rows in measured.items():
        step, waits, own = (median(column) for column in zip(*rows, strict=True))
        first = first or step
        print(f"| {name} | {step:.2f} | {waits:.2f} | {own:.2f} | {first / step:.2f} |")


if __name__ == "__main__":
    main()
