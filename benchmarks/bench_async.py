"""Seconds per step of a synchronous run, and of runs with generations ahead: `make bench-async`.

    python benchmarks/bench_async.py [--rounds 3] [--steps 16]

A random Qwen3 of 4 layers trains on one core, and one vLLM engine generates on another. 64
completions per step end at random, after 64 tokens on average and 1,024 at most, so that a
generation ends with a few long ones. Runs take turns. For each the table has the seconds of a step
(without the first four, which fill the queue, and the last, which empties it), the seconds in which
the ranks waited for the engine, and the share of the time in which the engine was idle. Ideally a
step takes as long as the busier of ranks and engine.

The table also has the prediction of `megatron_grpo.planning.simulation` from synchronous runs
alone: seconds of the ranks, their core's seconds for requests, lengths of completions, and the
engine's seconds per forward pass. Measured separately before: the engine's seconds per prompt token
and per request, and its slowdown while the ranks train next to it on an earlier run's completions.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from demo.make_kinds import write
from engine_watch import Look, Watch, children_seconds, idle_share, pass_seconds
from helpers.engines.live import TestEngine, random_prompts, running_engine, sampling_params
from helpers.engines.sampling import Completions, Router
from helpers.models.tiny import EOS_ID, tiny_model
from helpers.runs.jobs import Job
from megatron_grpo.planning.simulation import Loop, Mode, simulate

FIRST = 4
BATCH = 64
MOST_AT_ONCE = 128
"""vLLM's `max_num_seqs` on CPUs."""
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
    f"grpo.generation_batch_size={BATCH}",
    "grpo.num_generations=8",
    "grpo.rollout_importance_sampling_mode=token_truncate",
    "optimizer.lr=1e-7",
    "train.save_interval=1000",
    "train.max_tokens_per_microbatch=8192",
    *[f"parallel.{axis}_parallel_size=1" for axis in ("tensor", "pipeline", "context")],
]
KINDS = (
    Mode(max_staleness=0, in_flight=False),
    Mode(max_staleness=1, in_flight=False),
    Mode(max_staleness=1, in_flight=True),
    Mode(max_staleness=4, in_flight=True),
)
PROMPT_TOKENS = 1000
ARRIVAL_SECONDS = 2.0
"""Time for all requests of a generation to reach the paused engine."""


@dataclass(frozen=True)
class Costs:
    """The engine's costs, measured before the runs."""

    token_seconds: float
    """Seconds to compute a prompt token."""
    receive_seconds: float
    """CPU seconds to receive a request."""
    slowdown: float
    """Seconds of the engine for a generation while the ranks train, over those without."""

    def __str__(self) -> str:
        return (
            f"a token of a prompt takes the engine {self.token_seconds * 1e6:.0f} us, a request "
            f"{self.receive_seconds * 1e3:.1f} ms; next to training it takes {self.slowdown:.2f} "
            "times as long"
        )


@dataclass(frozen=True)
class Measured:
    """The counted steps of one run; seconds are means over steps."""

    step: float
    waits: float
    """Waits for generations."""
    train: float
    push: float
    idle: float
    """Share of the time in which the engine was idle."""
    requests: float
    """Seconds of the ranks' core besides training and pushes: requests and their answers."""
    looks: list[Look]
    lengths: list[int]
    prompt_tokens: float
    """Mean length of a completion's prompt."""

    @property
    def start(self) -> float:
        """Seconds of a synchronous step without training and before the first token."""
        return max(0.0, self.idle * self.step - self.train - self.push)

    @property
    def ideal(self) -> float:
        """Seconds of a step if neither ranks nor engine waited."""
        return max(self.train + self.push, (1 - self.idle) * self.step)


def json_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.open(encoding="utf-8")]


def measured(run_dir: Path, steps: int, watch: Watch) -> Measured:
    """A run's means until `steps`, by its records and the watched engine."""
    records = json_lines(run_dir / "metrics.jsonl")[FIRST:steps]

    def seconds(*names: str) -> float:
        return sum(record.get(f"time/{name}", 0.0) for record in records for name in names) / len(
            records
        )

    waits = "wait_rollout" if any("time/wait_rollout" in each for each in records) else "generate"
    looks = watch.between(*window(run_dir, steps))
    rows = json_lines(run_dir / "completions.jsonl")
    train, push = seconds("pack", "logprobs", "train"), seconds("push", "verify_weights")
    return Measured(
        step=seconds("step"),
        waits=seconds(waits),
        train=train,
        push=push,
        requests=(looks[-1].computed - looks[0].computed) / (steps - FIRST) - train - push,
        idle=idle_share(looks),
        looks=looks,
        lengths=[row["num_tokens"] for row in rows],
        prompt_tokens=(looks[-1].prompts - looks[0].prompts) / (steps - FIRST) / BATCH,
    )


def window(run_dir: Path, steps: int) -> tuple[float, float]:
    """Times (`time.time()`) at the ends of training in step `FIRST` and in step `steps`."""
    lines = (run_dir / "timeline.json").read_text(encoding="utf-8").splitlines()[1:]
    events = [json.loads(line.rstrip(",")) for line in lines if line.startswith("{")]
    ends = [each["ts"] + each["dur"] for each in events if each["name"] == "train"]
    return ends[FIRST - 1] / 1e6, ends[steps - 1] / 1e6


def prompt_token_seconds(engine: TestEngine) -> float:
    """Seconds per prompt token: five prompts against one, with one sampled token each."""

    def seconds(count: int, seed: int) -> float:
        prompts = random_prompts(count, seed, (PROMPT_TOKENS, PROMPT_TOKENS + 1))
        start = time.perf_counter()
        engine.generate(prompts, num_generations=1, max_completion_length=1)
        return time.perf_counter() - start

    seconds(1, 0)
    rows = [(seconds(5, 2 * i + 1) - seconds(1, 2 * i + 2)) / (4 * PROMPT_TOKENS) for i in range(3)]
    return median(rows)


def receive_seconds(engine: TestEngine) -> float:
    """CPU seconds of the engine per request: a generation's requests reach it while it is paused,
    and its seconds without requests are subtracted."""
    router = Router(engine.client(), str)
    router.resume(engine.version)

    def seconds() -> float:
        start = children_seconds()
        time.sleep(ARRIVAL_SECONDS)
        return children_seconds() - start

    def more(number: int) -> float:
        prompts = random_prompts(BATCH // 8, number)
        params = sampling_params(num_generations=8, policy_version=engine.version)
        seconds()  # lets earlier requests end
        engine.pause()
        without = seconds()
        answered = router.submit(Completions(prompts, params, number))
        took = seconds() - without
        engine.resume()
        answered.result()
        return took / BATCH

    rows = [more(number) for number in range(4)]
    router.close()
    router.client.close()
    return median(rows[1:])


def slowdown(engine: TestEngine, arguments: argparse.Namespace, folder: Path) -> float:
    """Seconds of the engine for a generation while the ranks train, over those without.

    The ranks train on an earlier run's generations, so they send no requests.
    """
    model, steps = folder / "model", arguments.steps

    def seconds(longest: int) -> float:
        start = time.perf_counter()
        engine.generate(
            random_prompts(BATCH // 8),
            stop_token_ids=(EOS_ID, *END_TOKENS),
            num_generations=8,
            max_completion_length=longest,
        )
        return time.perf_counter() - start

    def pass_time() -> float:
        return seconds(1024) - seconds(1)

    keys = [f"train.num_steps={steps}", "train.save_generations=true"]
    with job(folder, "made", engine, arguments, *keys) as making:
        assert making.end(600).exit_codes == [0], making.output
    engine.push(model)
    pass_time()
    alone = [pass_time() for _ in range(5)]
    keys = [f"train.num_steps={steps}", f"train.replay={folder / 'made'}"]
    records, training_times = folder / "replayed" / "metrics.jsonl", list[float]()
    with job(folder, "replayed", engine, arguments, *keys) as training:
        training.wait_for(records.exists, 600)
        while training.is_running and records.read_text(encoding="utf-8").count("\n") < steps:
            training_times.append(pass_time())
    assert len(training_times) > 1, "training was over before a generation: it needs more --steps"
    return median(training_times[:-1]) / median(alone)  # training ends during the last


def predicted(runs: Sequence[Measured], costs: Costs) -> Callable[[Mode], float]:
    """Seconds of a step by simulation, from synchronous runs."""
    passes = [pass_seconds(run.looks) for run in runs]
    prompt_seconds = costs.token_seconds * mean(run.prompt_tokens for run in runs)
    loop = Loop(
        lengths=[length for run in runs for length in run.lengths],
        batch=BATCH,
        num_engines=1,
        at_once=MOST_AT_ONCE,
        pass_seconds=lambda running: mean(each(running) for each in passes),
        slowdown=costs.slowdown,
        prompt_seconds=prompt_seconds,
        token_seconds=costs.token_seconds,
        start_seconds=max(0.0, median(run.start for run in runs) - BATCH * prompt_seconds),
        receive_seconds=costs.receive_seconds,
        train_seconds=median(run.train for run in runs),
        push_seconds=median(run.push for run in runs),
        requests_seconds=median(run.requests for run in runs),
    )
    return lambda mode: simulate(loop, mode).seconds


def keys_of(mode: Mode) -> list[str]:
    return [
        f"rollout.max_staleness={mode.max_staleness}",
        f"rollout.in_flight_updates={str(mode.in_flight).lower()}",
    ]


def table(runs: dict[Mode, list[Measured]], costs: Costs) -> str:
    """Medians of the rounds, as Markdown."""
    first = median(run.step for run in runs[KINDS[0]])
    prediction = predicted(runs[KINDS[0]], costs)
    lines = [
        "| max_staleness | seconds per step | predicted | ideal | waiting for the engine "
        "| the ranks' own | engine idle | speed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for mode, rows in runs.items():
        step = median(run.step for run in rows)
        own = median(run.train + run.push for run in rows)
        lines.append(
            f"| {mode} | {step:.2f} | {prediction(mode):.2f} | "
            f"{median(run.ideal for run in rows):.2f} | {median(run.waits for run in rows):.2f} | "
            f"{own:.2f} | {median(run.idle for run in rows):.0%} | {first / step:.2f} |"
        )
    return "\n".join(lines)


def job(
    folder: Path, name: str, engine: TestEngine, arguments: argparse.Namespace, *keys: str
) -> Job:
    """A run in `folder / name`."""
    return Job(
        [
            *COMMON,
            *arguments.override,
            *keys,
            f"model.path={folder / 'model'}",
            f"data.path={folder / 'kinds.jsonl'}",
            f"train.run_dir={folder / name}",
            f"rollout.base_urls=[{engine.servers.base_urls[0]}]",
        ],
        1,
        folder / f"logs_{name}",
        token=engine.servers.token,
    )


def run(
    mode: Mode, arguments: argparse.Namespace, folder: Path, number: int, engine: TestEngine
) -> Measured:
    """Train once."""
    name = f"{number}_{mode.max_staleness}_{mode.in_flight}"
    keys = *keys_of(mode), f"train.num_steps={arguments.steps + mode.max_staleness}"
    (core,) = os.sched_getaffinity(0)
    with (
        Watch(engine.servers.base_urls[0], engine.servers.token, core) as watch,
        job(folder, name, engine, arguments, *keys) as training,
    ):
        ended = training.end(600)
    assert ended.exit_codes == [0], ended.output
    return measured(folder / name, arguments.steps, watch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("override", nargs="*", help="key.sub=value of the config")
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    runs: dict[Mode, list[Measured]] = {mode: [] for mode in KINDS}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = tiny_model(folder / "model", "qwen3", tied=True, **SHAPE)
        write(folder / "kinds.jsonl")
        os.sched_setaffinity(0, cores[:1])
        with running_engine("vllm", model, folder / "engine") as engine:
            os.sched_setaffinity(0, cores[1:2])
            engine.push(model)
            costs = Costs(
                token_seconds=prompt_token_seconds(engine),
                receive_seconds=receive_seconds(engine),
                slowdown=slowdown(engine, arguments, folder),
            )
            print(costs, flush=True)
            for number in range(arguments.rounds):
                for mode in KINDS:
                    made = run(mode, arguments, folder, number, engine)
                    runs[mode].append(made)
                    print(f"{mode}: {made.step:.2f} s, engine idle {made.idle:.0%}", flush=True)
    print(table(runs, costs))


if __name__ == "__main__":
    main()
