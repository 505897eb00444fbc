"""Advantages and clipped loss of 2,048 completions of up to 8,192 tokens, 62% of them padding.

Loss: forward and backward of PPO's clipped surrogate with dual clip, mean over all tokens, to the
log-probabilities as a model's head leaves them, with verl's three metrics; one side of ours has all
fifteen of `TrainMetrics` in their place, by sequence where wanted. verl has rows of 8,192 places,
all 2,048 or 8 at a time; ours are packed microbatches of up to 65,536 tokens, each completion
behind a prompt of 256.
Advantages: of groups of 16, brought to every token of what the loss will be given: in rows of 8,192
places for verl, in packed microbatches for ours.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from best_time import best_time

NUM_SEQUENCES, GROUP, MOST, PROMPT = 2048, 16, 8192, 256
TOKENS_PER_MICROBATCH = 65536
EPSILON, DELTA, STD_EPSILON = 0.2, 3.0, 1e-6

VERL = [
    "verl==0.9.1",
    *("ray==2.60.0", "tensordict==0.15.3", "orjson==3.13.0", "omegaconf==2.3.1"),
    *("antlr4-python3-runtime==4.9.3", "hydra-core==1.3.8", "pyvers==0.2.3"),
    *("cloudpickle==3.1.2", "msgpack==1.2.4", "importlib_metadata==10.2.0", "codetiming==1.4.0"),
]
TITLE = "Advantages and clipped loss, 2,048 x 8,192 with 62% padding"
REQUIREMENTS = {"verl": VERL, "verl, 8 rows at a time": VERL}
SETTINGS = {
    "ours, all metrics": "what the trainer reports in the place of those of verl",
    "verl": "compute_policy_loss_vanilla on all rows at once, token-mean; "
    "compute_grpo_vectorized_outcome_advantage",
    "verl, 8 rows at a time": "the same with ppo_micro_batch_size_per_gpu 8",
}
GOALS = [
    ("loss_seconds", "verl", 7.0),
    ("loss_seconds", "verl, 8 rows at a time", 7.0),
    ("advantage_seconds", "verl", 3.0),
    ("advantage_seconds", "verl, 8 rows at a time", 3.0),
]


def lengths() -> Tensor:
    """Tokens of each completion: lognormal, cut at the most, 3,110 on average."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(NUM_SEQUENCES, generator=generator).mul(0.75).add(7.82).exp()
    return drawn.long().clamp(8, MOST)


def case() -> SimpleNamespace:
    """Values of all tokens, end to end, and rewards."""
    generator = torch.Generator().manual_seed(1)
    num = int(lengths().sum())
    old = -torch.rand(num, generator=generator)
    return SimpleNamespace(
        lengths=lengths(),
        old=old,
        new=old + 0.3 * torch.randn(num, generator=generator),
        rewards=torch.rand(NUM_SEQUENCES, generator=generator),
        groups=torch.arange(NUM_SEQUENCES) // GROUP,
    )


def ours(folder: Path, all_metrics: bool = False) -> dict[str, float]:
    """Packed."""
    from megatron_grpo.algorithm.loss_function import LossFunction
    from megatron_grpo.algorithm.advantages import group_advantages
    from megatron_grpo.algorithm.loss import LossTokens, grpo_loss
    from megatron_grpo.config.grpo import GRPOConfig
    from megatron_grpo.reporting.metrics import TrainMetrics
    from parallel.alignment import Alignment
    from parallel.logprobs import ChosenTokens
    from parallel.packing import ColumnMap, TokenSequence, pack

    given = case()
    cfg = GRPOConfig(
        generation_batch_size=NUM_SEQUENCES,
        num_generations=GROUP,
        loss_type="dapo",
        epsilon=EPSILON,
        delta=DELTA,
        beta=0.0,
    )

    members = microbatches(given.lengths)
    places = [list(completion_places(given.lengths[batch].tolist())) for batch in members]
    token_places = [ColumnMap(where, where[-1].stop) for where in places]

    def advantages() -> list[float]:
        found: list[float] = group_advantages(
            given.rewards, given.groups, "group", epsilon=STD_EPSILON
        ).tolist()
        return found

    def of_batches() -> list[Tensor]:
        known = advantages()
        return [
            where.column([known[i] for i in batch])
            for batch, where in zip(members, token_places, strict=True)
        ]

    def of_tokens() -> Tensor:
        columns = zip(of_batches(), places, strict=True)
        return torch.cat([column[place] for column, where in columns for place in where])

    sequences = [
        TokenSequence(
            tokens=torch.zeros(PROMPT + len(old), dtype=torch.int64),
            num_prompt_tokens=PROMPT,
            advantage=advantage,
            loss_weight=1 / len(given.old),
            rollout_logprobs=old,
            old_logprobs=old,
        )
        for old, advantage in zip(
            given.old.split(given.lengths.tolist()), advantages(), strict=True
        )
    ]
    batches, heads = [], []
    new = given.new.split(given.lengths.tolist())
    for indices in members:
        batch = pack(sequences, indices, Alignment())
        of_batch = [new[i] for i in indices]
        values = torch.cat(of_batch).requires_grad_()
        positions = batch.loss_mask.nonzero().squeeze(1)
        entropy = torch.ones(len(values))
        batches.append(batch)
        heads.append(ChosenTokens(positions=positions, logprobs=values, entropy=entropy))

    function = LossFunction.of(cfg)

    def loss() -> float:
        metrics, sums = TrainMetrics(NUM_SEQUENCES, values=function.values), []
        for batch, chosen in zip(batches, heads, strict=True):
            chosen.logprobs.grad = None
            tokens = LossTokens.select(batch, chosen)
            found = grpo_loss(tokens, cfg, function, 0.0)
            if all_metrics:
                metrics.add(tokens, found)
            else:
                is_cut = found.clipped_low | found.clipped_high
                is_bounded = (found.log_ratio > math.log(DELTA)) & (tokens.advantages < 0)
                kept = (found.per_token, found.log_ratio, is_cut, is_bounded)
                sums.append([each.sum().item() for each in kept])
            found.total.backward()
        if all_metrics:
            return metrics.reduce(lambda tensor, op: None, cfg).metrics["loss"]
        return sum(each[0] for each in sums)

    loss()
    gradients = [head.logprobs.grad for head in heads if head.logprobs.grad is not None]
    return measured(folder, loss, of_tokens, torch.cat(gradients), of_batches)


def completion_places(of_completions: list[int]) -> Iterator[slice]:
    """Where the completions of a microbatch lie, each behind its prompt."""
    end = 0
    for length in of_completions:
        start = end + PROMPT
        end = start + length
        yield slice(start, end)


def microbatches(of_sequences: Tensor) -> list[list[int]]:
    """Sequences in their order, as many as have room."""
    found: list[list[int]] = [[]]
    room = TOKENS_PER_MICROBATCH
    for index, length in enumerate((of_sequences + PROMPT).tolist()):
        if length > room:
            found.append([])
            room = TOKENS_PER_MICROBATCH
        found[-1].append(index)
        room -= length
    return found


def verl(folder: Path, rows: int = NUM_SEQUENCES) -> dict[str, float]:
    """Padded, `rows` at a time."""
    from verl.trainer.ppo.core_algos import (
        compute_grpo_vectorized_outcome_advantage,
        compute_policy_loss_vanilla,
    )
    from verl.workers.config import ActorConfig

    given = case()
    mask = torch.arange(MOST) < given.lengths[:, None]
    rewards = torch.zeros(NUM_SEQUENCES, MOST)
    rewards[torch.arange(NUM_SEQUENCES), given.lengths - 1] = given.rewards
    old, new = (
        torch.zeros(NUM_SEQUENCES, MOST).masked_scatter(mask, values)
        for values in (given.old, given.new)
    )
    response_mask = mask.float()
    groups = given.groups.numpy()

    def advantages() -> Tensor:
        spread, _ = compute_grpo_vectorized_outcome_advantage(
            rewards, response_mask, groups, epsilon=STD_EPSILON
        )
        found: Tensor = spread
        return found

    config = ActorConfig(
        strategy="fsdp",
        rollout_n=GROUP,
        ppo_micro_batch_size_per_gpu=8,
        clip_ratio=EPSILON,
        clip_ratio_low=EPSILON,
        clip_ratio_high=EPSILON,
        clip_ratio_c=DELTA,
    )
    of_rows = advantages()
    total = len(given.old)
    config.global_batch_info.update(batch_num_tokens=total, dp_size=1)
    parts = [
        (o, n.requires_grad_(), a, m)
        for o, n, a, m in zip(
            *(values.split(rows) for values in (old, new, of_rows, response_mask)), strict=True
        )
    ]

    def loss() -> float:
        found = 0.0
        for o, n, a, m in parts:
            n.grad = None
            part, _ = compute_policy_loss_vanilla(o, n, a, m, "token-mean", config)
            part.backward()
            found += part.item()
        return found

    loss()
    gradients = torch.cat([n.grad for _, n, _, _ in parts if n.grad is not None])
    return measured(folder, loss, lambda: advantages()[mask], gradients[mask], advantages)


def measured(
    folder: Path,
    loss: Callable[[], float],
    of_tokens: Callable[[], Tensor],
    gradient: Tensor,
    advantages: Callable[[], object],
) -> dict[str, float]:
    """The best of ten losses and of fifty advantages; and the outputs, by completion."""
    torch.save((loss(), of_tokens(), gradient), folder / "outputs.pt")
    return {
        "loss_seconds": best_time(loss, 10),
        "advantage_seconds": best_time(advantages, 50),
    }


SIDES = {
    "ours": ours,
    "ours, all metrics": lambda folder: ours(folder, all_metrics=True),
    "verl": verl,
    "verl, 8 rows at a time": lambda folder: verl(folder, 8),
}


def compare(ours: Path, peer: Path) -> str:
    """Loss, advantages and the gradient of every token."""
    own, other = (torch.load(folder / "outputs.pt") for folder in (ours, peer))
    assert abs(own[0] - other[0]) <= 1e-5 * abs(other[0]) + 1e-8, (own[0], other[0])
    torch.testing.assert_close(own[1], other[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(own[2], other[2], rtol=1e-4, atol=1e-11)
    worst = float((own[2] - other[2]).abs().max() / other[2].abs().max())
    return f"loss {own[0]:.8f} and {other[0]:.8f}, gradients within {worst:.0e} of the largest"
