"""Made-up run directories in the form of real runs, written in milliseconds."""

import json
import math
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import yaml

from megatron_grpo.viewer.run import RunFiles
from megatron_grpo.viewer.server import Server

NUM_PROMPTS, NUM_GENERATIONS = 4, 4
"""Completions of a step: four for each of four prompts, which recur after `PERIOD` steps."""
PERIOD = 3
MAX_TOKENS = 32
"""Tokens of a completion with recorded values."""


def write_run(run_dir: Path, num_steps: int = 12, lr: float = 1e-6, seed: int = 0) -> Path:
    """Write a run of `num_steps`, with an evaluation every fourth step; returns its directory."""
    run_dir.mkdir(parents=True)
    chance = random.Random(seed)
    steps = range(1, num_steps + 1)
    rows = {step: completions(step, chance) for step in steps}
    write_rows(run_dir / "metrics.jsonl", [metrics(step, rows[step], chance) for step in steps])
    write_rows(run_dir / "completions.jsonl", [row for step in steps for row in rows[step]])
    logged = [row for step in steps for row in rows[step] if row["sample_index"] < 3]
    write_rows(run_dir / "tokens.jsonl", [token_row(row, chance) for row in logged])
    evaluated = [row for step in steps if step % 4 == 0 for row in evaluation(step, chance)]
    write_rows(run_dir / "eval_completions.jsonl", evaluated)
    events = [json.dumps(event) + ",\n" for event in timeline(steps)]
    (run_dir / "timeline.json").write_text("[\n" + "".join(events), encoding="utf-8")
    config = {
        "model": {"path": "models/tiny"},
        "grpo": {"beta": 0.0, "num_iterations": 1, "steps_per_generation": 1},
        "optimizer": {"lr": lr, "weight_decay": 0.0},
        "train": {"num_steps": num_steps, "run_dir": str(run_dir)},
    }
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return run_dir


@contextmanager
def viewed(runs: Mapping[str, RunFiles]) -> Iterator[int]:
    """Serve the runs by a viewer; yields its port."""
    with Server(runs, port=0) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
    )


def completions(step: int, chance: random.Random) -> list[dict]:
    rows = []
    for n in range(NUM_PROMPTS):
        index = step % PERIOD * NUM_PROMPTS + n
        a, b = 17 + 3 * index, 5 + 7 * index % 60
        skill = 0.25 + 0.6 * (1 - math.exp(-step / 30))
        rows += [completion(step, index, k, a, b, skill, chance) for k in range(NUM_GENERATIONS)]
    return rows


def completion(
    step: int, index: int, sample: int, a: int, b: int, skill: float, chance: random.Random
) -> dict:
    """One log row. Sample 3 of a step's first prompt failed, sample 2 was cut; prompt 1 has an
    agent that calls a tool and starts a new sequence."""
    said = a + b if chance.random() < skill else a + b + chance.choice([-10, -1, 1, 10])
    text = (
        f"First {a} + {b // 10 * 10} = {a + b // 10 * 10}.\nThen add {b % 10}, which gives {said}."
    )
    has_failed = index % NUM_PROMPTS == 0 and sample == 3
    is_dialogue = index % NUM_PROMPTS == 1
    text += " Let me check this once more." * (
        chance.randint(3, 5) if sample == 2 else chance.randint(0, 1)
    )
    reward = None if has_failed else float(said == a + b) + 0.2 * (sample != 2)
    turns = [
        {"role": "assistant", "text": f"<tool>add({a}, {b})</tool>", "reward": 0.0},
        {"role": "tool", "text": f"\nThe result is {a + b}.\n", "reward": None},
        {"role": "assistant", "text": text, "reward": reward},
    ]
    for turn, branch in zip(turns, (0, 0, 1), strict=True):
        turn |= {"num_tokens": len(pieces(turn["text"])), "branch": branch}
    turns[0]["calls"] = ["add"]
    question = f"What is {a} + {b}? Think step by step."
    said_by_policy = turns[::2] if is_dialogue else turns[2:]
    return {
        "step": step,
        "prompt_index": index,
        "sample_index": sample,
        "prompt": f"<|user|>\n{question}\n<|assistant|>\n",
        "messages": [{"role": "user", "content": question}],
        "completion": "".join(turn["text"] for turn in turns) if is_dialogue else text,
        "num_tokens": sum(len(pieces(turn["text"])) for turn in said_by_policy),
        "reward": reward,
        "rewards": {"exact": None if has_failed else float(said == a + b), "format": 1.0},
        "advantage": 0.0 if has_failed else round((reward or 0) - skill, 4),
        "entropy": round(0.6 * math.exp(-step / 40) + 0.1 * chance.random(), 4),
        "logprob_gap": round(0.01 + 0.02 * chance.random(), 5),
        "finish_reason": "length" if sample == 2 else "stop",
        "policy_version": step - 3 if index % NUM_PROMPTS == 2 and step > 3 else step - 1,
        **({"metrics": {"calls": 1.0}} if is_dialogue else {}),
        **({"failure": "its stderr ends with\nKeyError: 'sum'"} if has_failed else {}),
        "columns": {"answer": str(a + b)},
        **({"turns": turns} if is_dialogue else {}),
    }


def pieces(text: str) -> list[str]:
    """Split a text like a tokenizer: each word with the space before it."""
    words = text.replace("\n", " \n").split(" ")
    return [words[0], *(f" {word}" for word in words[1:])] if text else []


def token_row(row: dict, chance: random.Random) -> dict:
    """Values of a completion's tokens; every ninth is clipped, alternately high and low."""
    parts = [(piece, 1) for piece in pieces(row["completion"])]
    if "turns" in row:
        parts = [
            (piece, int(turn["role"] == "assistant"))
            for turn in row["turns"]
            for piece in pieces(turn["text"])
        ]
    parts = parts[:MAX_TOKENS]
    mask = [each for _, each in parts]
    ratio = [math.exp(chance.gauss(0, 0.05)) for _ in parts]
    clipped = [0] * len(parts)
    for k in range(4, len(parts), 9):
        clipped[k] = 1 if k % 2 == 0 else -1
        ratio[k] = 1.35 if clipped[k] > 0 else 0.7
    engine = [-0.4 - abs(chance.gauss(0, 0.5)) for _ in parts]
    gap = [chance.gauss(0, 0.02) for _ in parts]
    values = {
        "logprob": [a + b + math.log(r) for a, b, r in zip(engine, gap, ratio, strict=True)],
        "rollout_logprob": engine,
        "gap": gap,
        "ratio": ratio,
        "advantage": [row["advantage"] * each for each in mask],
        "entropy": [abs(chance.gauss(0, row["entropy"])) for _ in parts],
        "loss_weight": [each / sum(mask) for each in mask],
    }
    return {
        **{key: row[key] for key in ("step", "prompt_index", "sample_index", "policy_version")},
        "tokens": [piece for piece, _ in parts],
        "token_ids": [sum(map(ord, piece)) for piece, _ in parts],
        "mask": mask,
        **{name: [round(value, 5) for value in each] for name, each in values.items()},
        "clipped": [side * each for side, each in zip(clipped, mask, strict=True)],
    }


def evaluation(step: int, chance: random.Random) -> list[dict]:
    rows = []
    for row in completions(step, chance)[:8]:
        kept = ("step", "prompt", "completion", "rewards", "reward", "finish_reason")
        more = {"prompt_index": row["prompt_index"], "sample_index": row["sample_index"]}
        passed = None if row["reward"] is None else row["reward"] >= 1
        rows.append({**{key: row[key] for key in kept}, "passed": passed, **more})
    return rows


def metrics(step: int, rows: list[dict], chance: random.Random) -> dict:
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    lengths = [row["num_tokens"] for row in rows]
    reward = sum(rewards) / len(rewards)
    record = {
        "step": step,
        "kl": None,
        "loss": round(chance.gauss(0, 0.01), 5),
        "grad_norm": round(0.8 + 0.3 * chance.random(), 4),
        "reward": round(reward, 4),
        "reward/exact/mean": round(reward - 0.15, 4),
        "reward/format/mean": 1.0,
        "frac_reward_zero_std": round(max(0.0, 0.3 - step / 300 + chance.gauss(0, 0.05)), 4),
        "entropy": round(sum(row["entropy"] for row in rows) / len(rows), 4),
        "completions/mean_length": sum(lengths) / len(lengths),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": 0.25,
        "rollout/logprob_gap_mean": round(0.02 + 0.004 * chance.random(), 5),
        "rollout/staleness_mean": 0.5,
        "clip_ratio/high_mean": round(0.01 * chance.random(), 5),
        "time/generate": 8.0,
        "time/train": 5.0,
        "time/step": round(13.5 + chance.random(), 3),
    }
    if step % 4 == 0:
        record |= {"eval/pass@1": round(reward / 1.3, 4), "eval/mean@4": round(reward, 4)}
    return record


def timeline(steps: range) -> list[dict]:
    events = [
        {"name": "thread_name", "ph": "M", "tid": tid, "args": {"name": name}, "pid": 0}
        for tid, name in enumerate(("trainer", "rollout"))
    ]
    for step in steps:
        start = step * 14_000_000
        phases = [("push", 1.0, 0), ("wait_rollout", 4.0, 0), ("pack", 0.5, 0), ("train", 8.0, 0)]
        for name, seconds, tid in [*phases, ("generate", 9.0, 1)]:
            about = {"step": step} if tid == 0 else {"generation": step, "policy_version": step - 1}
            ts = start if tid == 0 else step * 14_000_000 + 2_000_000
            dur = round(seconds * 1e6)
            event = {"name": name, "ph": "X", "ts": ts, "dur": dur, "tid": tid}
            events.append({**event, "args": about, "pid": 0})
            start += dur if tid == 0 else 0
    return events
