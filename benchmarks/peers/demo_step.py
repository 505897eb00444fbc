"""A step of the demo: `configs/demo_smollm2_135m.yaml`, 64 completions of 8 prompts and an update.

- ours: `megatron-grpo train` as `make demo` runs it: two ranks and an engine of vLLM.
- trl: its trainer with float32 weights and bfloat16 autocast, which as ours keeps what it adds up
  in float32; and with bfloat16 weights and moments, which computes less exactly. Both generate with
  transformers: its vLLM modes need a GPU.

All train on the same rows with the same reward, lengths and optimizer. Tokens are drawn by each
side's own generator, so that completions differ; a step of more tokens than others is no result.
Needs the model and data of `make demo-data`.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from demo.rewards import last_number

CONFIG, MODEL, DATA = (
    "configs/demo_smollm2_135m.yaml",
    "models/SmolLM2-135M-Instruct",
    "data/sums.jsonl",
)
NUM_STEPS, NUM_WARMUP_STEPS = 6, 1
BATCH_SIZE, NUM_GENERATIONS, LONGEST = 64, 8, 16
SECONDS, LENGTH = "step_seconds", "mean completion length"

ROUNDS = 3
TITLE = "A step of the demo: SmolLM2-135M-Instruct, 64 completions of 8 prompts, up to 16 tokens"
REQUIREMENTS: dict[str, list[str]] = {}
SETTINGS = {
    "trl": (
        f"{version('trl')} as in the project's environment: float32 weights, bfloat16 autocast, "
        "one microbatch of 64, no gradient checkpointing, transformers generates"
    ),
    "trl, bfloat16": "the same with weights, gradients and moments in bfloat16",
}


def ours(folder: Path) -> dict[str, float]:
    """The command of the demo."""
    run_dir = folder / "run"
    command = [sys.executable, "-m", "megatron_grpo", "train", CONFIG]
    command += [f"train.num_steps={NUM_STEPS}", f"train.run_dir={run_dir}"]
    start = time.time()
    subprocess.run(command, check=True)
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    events = (run_dir / "timeline.json").read_text(encoding="utf-8")
    first = next(e for e in json.loads(events) if e["name"] == "log")
    return leave(
        folder,
        [record["time/step"] for record in records],
        [record["completions/mean_length"] for record in records],
        first["ts"] / 1e6 - start,
    )


def trl(folder: Path, dtype: torch.dtype) -> dict[str, float]:
    """TRL's trainer, from step to step."""
    start = time.time()
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    ends: list[float] = []
    lengths: list[float] = []

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            ends.append(time.time())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.time())

        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            lengths.extend([logs[name] for name in logs if name == "completions/mean_length"])

    rows = [json.loads(line) for line in Path(DATA).read_text(encoding="utf-8").splitlines()]
    prompts = [[{"role": "user", "content": row["prompt"]}] for row in rows]
    args = GRPOConfig(
        output_dir=str(folder / "trl"),
        report_to=[],
        use_cpu=True,
        bf16=dtype == torch.float32,
        gradient_checkpointing=False,
        per_device_train_batch_size=BATCH_SIZE,
        gradient_accumulation_steps=1,
        num_generations=NUM_GENERATIONS,
        max_completion_length=LONGEST,
        max_steps=NUM_STEPS,
        learning_rate=3e-5,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        max_grad_norm=1.0,
        temperature=1.0,
        beta=0.0,
        loss_type="dapo",
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
    )
    GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(MODEL, dtype=dtype),
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset.from_dict(
            {"prompt": prompts, "answer": [row["answer"] for row in rows]}
        ),
        callbacks=[Clock()],
    ).train()
    seconds = [after - before for before, after in zip(ends, ends[1:], strict=False)]
    return leave(folder, seconds, lengths, ends[1] - start)


def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """The demo's, of TRL's conversations."""
    return last_number([each[0]["content"] for each in completions], answer)


def leave(
    folder: Path, seconds: list[float], lengths: list[float], until_first: float
) -> dict[str, float]:
    """Write the lengths, which are compared; the figures, without the first step's time."""
    assert len(seconds) == len(lengths) == NUM_STEPS
    (folder / "lengths.json").write_text(json.dumps(lengths), encoding="utf-8")
    return {
        SECONDS: median(seconds[NUM_WARMUP_STEPS:]),
        "seconds from the start to the end of the first step": until_first,
        LENGTH: fmean(lengths),
    }


SIDES: dict[str, Callable[[Path], dict[str, float]]] = {
    "ours": ours,
    "trl": partial(trl, dtype=torch.float32),
    "trl, bfloat16": partial(trl, dtype=torch.bfloat16),
}
GOALS = [(SECONDS, "trl", 1.0), (SECONDS, "trl, bfloat16", 1.0)]


def compare(ours: Path, peer: Path) -> str:
    """The first step's completions, by the same weights, are about as long."""
    mine, theirs = (json.loads((folder / "lengths.json").read_text()) for folder in (ours, peer))
    assert abs(mine[0] - theirs[0]) < 0.1 * theirs[0], f"{mine[0]:.1f} and {theirs[0]:.1f} tokens"
    return f"completions of step 1 have {theirs[0]:.1f} tokens, ours {mine[0]:.1f}"
