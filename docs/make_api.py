"""Writes docs/api.md: the functions for Python, from their docstrings.

    python docs/make_api.py

Each example is executed, and the page shows what it printed.
"""

import contextlib
import inspect
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import megatron_grpo
from megatron_grpo.algorithm.advantages import group_advantages, process_advantages
from megatron_grpo.algorithm.kl import kl_estimate
from megatron_grpo.algorithm.loss import LossTokens, grpo_loss, loss_weights
from megatron_grpo.rewards.math import math_answer
from parallel.layout import Layout, intersect
from parallel.logprobs import chosen_logprobs
from parallel.microbatches import plan_microbatches
from parallel.packing import pack

PAGE = Path(__file__).with_name("api.md")
HEAD = """# Functions for Python

Runs start from Python as from the command line, and [a notebook](python.ipynb) shows how. The
mathematics of the trainer works alone, too, in one process and without a GPU: for a test or another
trainer. This page is made by `python docs/make_api.py` from the docstrings; every example of the
mathematics was executed.
"""

ADVANTAGES = """
import torch
from megatron_grpo.algorithm.advantages import group_advantages

rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, float("nan")])  # the last one has no score
groups = torch.tensor([0, 0, 0, 1, 1, 1])
print(group_advantages(rewards, groups, "group"))
print(group_advantages(rewards, groups, "none", estimator="rloo"))
"""
PROCESS = """
import torch
from megatron_grpo.algorithm.advantages import process_advantages

# Two completions of one prompt: (index of a step's last token, its reward), and their lengths.
steps = [[(1, 1.0), (3, 0.0)], [(2, 1.0)]]
for advantages in process_advantages(steps, [4, 3], torch.tensor([0, 0])):
    print(advantages)
"""
WEIGHTS = """
import torch
from megatron_grpo.algorithm.loss import loss_weights

lengths = torch.tensor([2, 6])
for aggregation in ("sequence", "token", "constant"):
    print(aggregation, loss_weights(lengths, aggregation, constant=8))
"""
KL = """
import torch
from megatron_grpo.algorithm.kl import kl_estimate

policy, reference = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -2.0])
for estimator in ("k1", "k2", "k3"):
    print(estimator, kl_estimate(policy, reference, estimator))
"""
PACK = """
import torch
from parallel.alignment import Alignment
from parallel.packing import TokenSequence, pack

sequences = [
    TokenSequence(
        tokens=torch.tensor(tokens),
        num_prompt_tokens=2,
        advantage=advantage,
        loss_weight=0.25,
        rollout_logprobs=torch.zeros(len(tokens) - 2),
    )
    for tokens, advantage in (([5, 6, 7, 8, 9], 1.0), ([5, 6, 3], -1.0))
]
batch = pack(sequences, [0, 1], Alignment(sequence=4, total=4))
print(batch.tokens)
print(batch.cu_seqlens, batch.position_ids)
print(batch.advantages)
"""
MICROBATCHES = """
from parallel import ParallelDims
from parallel.alignment import Alignment
from parallel.microbatches import CostModel, plan_microbatches

lengths = [900, 100, 300, 500, 700, 200]
dims, alignment = ParallelDims(data=2), Alignment(sequence=1, total=1)
print(plan_microbatches(lengths, 1024, dims, alignment, CostModel.transformer(1024)))
"""
LOGPROBS = """
import torch
from parallel.logprobs import chosen_logprobs
from parallel.rank_part import Predictions

torch.manual_seed(0)
hidden, weight = torch.randn(4, 16), torch.randn(32, 16)  # [tokens, size], [vocabulary, size]
tokens = torch.tensor([3, 1, 4, 1])
targets = torch.tensor([1, 2, 3, -1])  # each position predicts the next token
select = torch.tensor([False, True, True, True])
options = {"temperature": 1.0, "vocab_size": 32, "tensor_group": None}
predictions = Predictions.of(targets, select)
chosen = chosen_logprobs(hidden, weight, tokens, predictions, **options)
logits = torch.log_softmax(hidden @ weight.T, dim=-1)
print(torch.allclose(chosen.logprobs, logits[[0, 1, 2], tokens[1:]], atol=1e-5))
"""
LOSS = """
from dataclasses import replace

import torch
from parallel.alignment import Alignment
from parallel.logprobs import ChosenTokens
from parallel.packing import TokenSequence, pack
from megatron_grpo.algorithm.loss import LossTokens, grpo_loss
from megatron_grpo.algorithm.loss_function import LossFunction
from megatron_grpo.config.grpo import GRPOConfig

completion = TokenSequence(
    tokens=torch.tensor([5, 6, 7, 8]),
    num_prompt_tokens=1,
    advantage=1.0,
    loss_weight=1 / 3,
    rollout_logprobs=torch.tensor([-1.0, -2.0, -0.5]),
)
batch = pack([completion], [0], Alignment(sequence=1, total=1))
batch = replace(batch, old_logprobs=batch.rollout_logprobs)
logprobs = torch.tensor([-0.5, -2.0, -0.6], requires_grad=True)
positions = torch.tensor([1, 2, 3])
chosen = ChosenTokens(positions=positions, logprobs=logprobs, entropy=torch.zeros(3))
cfg = GRPOConfig(generation_batch_size=8, loss_type="grpo")
loss = grpo_loss(LossTokens.select(batch, chosen), cfg, LossFunction.of(cfg), beta=0.0)
loss.total.backward()
print(loss.total.item(), loss.clipped_high, logprobs.grad)
"""
RESHARD = """
from parallel.layout import Box, Layout, ShardMapping, intersect

# A [4, 6] matrix: this rank has its upper half, and wants its left half.
have = Layout({"w": (2, 6)}, (ShardMapping("w", Box.whole((2, 6)), "w", Box((0, 0), (2, 6))),))
want = Layout({"w": (4, 3)}, (ShardMapping("w", Box.whole((4, 3)), "w", Box((0, 0), (4, 3))),))
for copy in intersect(have, want):
    print(copy)
"""
REWARD = """
from megatron_grpo.rewards.math import math_answer

completions = ["So it is \\\\boxed{1/2}.", "I think 0.4"]
print(math_answer(completions, answer=["0.5", "0.5"], finish_reasons=["stop", "stop"]))
"""
PIECES: dict[str, list[tuple[Callable[..., Any], str]]] = {
    "Runs": [
        (megatron_grpo.load_config, ""),
        (megatron_grpo.check, ""),
        (megatron_grpo.plan, ""),
        (megatron_grpo.train, ""),
        (megatron_grpo.Report, ""),
        (megatron_grpo.Run, ""),
    ],
    "Advantages": [(group_advantages, ADVANTAGES), (process_advantages, PROCESS)],
    "Losses": [
        (loss_weights, WEIGHTS),
        (grpo_loss, LOSS),
        (LossTokens, ""),
        (kl_estimate, KL),
    ],
    "Log-probabilities": [(chosen_logprobs, LOGPROBS)],
    "Packing": [(pack, PACK), (plan_microbatches, MICROBATCHES)],
    "Layouts": [(Layout, ""), (intersect, RESHARD)],
    "Rewards": [(math_answer, REWARD)],
}


def page() -> str:
    """The text of docs/api.md."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield HEAD
    for heading, pieces in PIECES.items():
        yield f"## {heading}\n"
        for piece, example in pieces:
            name = piece.__qualname__
            room = "megatron_grpo" if name in megatron_grpo.__all__ else piece.__module__
            yield f"### `{room}.{name}`\n"
            yield f"```python\n{_signature(piece)}\n```\n"
            yield f"```text\n{inspect.getdoc(piece)}\n```\n"
            if example:
                yield f"```python\n{example.strip()}\n```\n"
                yield f"```text\n{_printed(example)}```\n"


def _signature(piece: Callable[..., Any]) -> str:
    if inspect.isclass(piece):
        return f"class {piece.__qualname__}"
    source = inspect.getsource(piece)
    return source[: source.index(":\n")].strip()


def _printed(example: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(example, {})
    return out.getvalue()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(os.path.relpath(PAGE))
