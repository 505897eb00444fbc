"""The sequences of one optimizer step, packed into microbatches."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path

from checkpoint_convert import ModelShape
from megatron_grpo.config.config import Config
from megatron_grpo.experience.batching import BatchSchedule
from megatron_grpo.rollout.vllm_command import engine_number
from parallel import ParallelDims
from parallel.alignment import Alignment, round_up
from parallel.microbatches import CostModel, plan_microbatches
from parallel.shared_prompts import PromptGroup, plan_shared_prompts


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What one optimizer step trains on."""

    lengths: Sequence[int]
    """Tokens of each prompt with its completion."""
    microbatches: int
    """Number of microbatches of each model copy."""
    padding: int
    """Tokens that alignment adds, over all copies."""
    room: int
    """Tokens that all microbatches of all copies could hold."""

    @property
    def tokens(self) -> int:
        """Tokens of all sequences, without padding."""
        return sum(self.lengths)


def longest_sequence(cfg: Config, shape: ModelShape) -> int:
    """Tokens of the longest prompt with the longest completion that a config allows."""
    if cfg.data.max_prompt_length is not None:
        return cfg.data.max_prompt_length + cfg.rollout.max_completion_length
    limit = engine_number(cfg.rollout.vllm, "max_model_len") or shape.max_position_embeddings
    return min(limit, cfg.train.max_tokens_per_microbatch)


def read_lengths(path: Path) -> list[int]:
    """Read one number of tokens per line, and sort them; ValueError that names an invalid line."""
    if not path.is_file():
        raise ValueError(f"{path} is no file: give one with one number of tokens per line")
    lengths = []
    for number, line in enumerate(path.read_text().split("\n"), start=1):
        if not line.strip():
            continue
        if not line.strip().isdigit() or int(line) == 0:
            raise ValueError(
                f"{path}, line {number}: {line.strip()!r} is not a length: each line must be the "
                "number of tokens of one prompt with its completion, such as 1024"
            )
        lengths.append(int(line))
    if not lengths:
        raise ValueError(f"{path} has no lengths: write one number of tokens per line")
    return sorted(lengths)


def spread(lengths: Sequence[int], count: int) -> list[int]:
    """`count` lengths with the distribution of `lengths` (ascending), including the longest."""
    chosen = [lengths[len(lengths) * (2 * i + 1) // (2 * count)] for i in range(count)]
    chosen[-1] = lengths[-1]  # the longest decides what must fit
    return chosen


def workload(cfg: Config, shape: ModelShape, lengths: Sequence[int]) -> Workload:
    """An optimizer step whose sequence lengths have the distribution of `lengths` (ascending).

    Raises ValueError if the batch arithmetic of `grpo.*` or the longest length does not work.
    """
    count = BatchSchedule.of(cfg.grpo).minibatch_size
    chosen = spread(lengths, count)
    dims, limit = cfg.dims, cfg.train.max_tokens_per_microbatch
    filled = _filled(
        tuple(chosen),
        limit,
        # Only these sizes affect how sequences are grouped; of expert, only whether it is above 1.
        ParallelDims(
            data=dims.data,
            pipeline=dims.pipeline,
            virtual_pipeline=dims.virtual_pipeline,
            expert=dims.data if dims.expert > 1 else 1,
        ),
        Alignment.of(dims, cfg.parallel.sequence_parallel),
        shape.hidden_size,
    )
    return Workload(
        lengths=chosen,
        microbatches=len(filled) // dims.data,
        padding=sum(filled) - sum(chosen),
        room=limit * len(filled),
    )


def shared_tokens(cfg: Config, shape: ModelShape, lengths: Sequence[int]) -> int | None:
    """Tokens, alignment included, that a step computes with `grpo.shared_prompts`.

    Prompts are taken to have `data.max_prompt_length` tokens; None if that is not set. `lengths`
    are those of a `Workload`.
    """
    if cfg.data.max_prompt_length is None:
        return None
    prompt = min(cfg.data.max_prompt_length, *lengths)
    num_groups = -(-len(lengths) // cfg.grpo.num_generations)
    groups = [
        PromptGroup(
            num_prompt_tokens=prompt,
            responses={i: lengths[i] - prompt for i in range(first, len(lengths), num_groups)},
        )
        for first in range(num_groups)
    ]
    alignment = Alignment.of(cfg.dims, cfg.parallel.sequence_parallel)
    plan = plan_shared_prompts(
        groups,
        cfg.train.max_tokens_per_microbatch,
        cfg.dims,
        alignment,
        CostModel.transformer(shape.hidden_size),
    )
    total = 0
    for microbatch in chain.from_iterable(plan):
        members: dict[int, list[int]] = {}
        for i in microbatch:
            members.setdefault(i % num_groups, []).append(i)
        total += sum(groups[at].length(those, alignment.sequence) for at, those in members.items())
    return total


@lru_cache(maxsize=1024)
def _filled(
    lengths: tuple[int, ...],
    max_tokens: int,
    dims: ParallelDims,
    alignment: Alignment,
    hidden_size: int,
) -> list[int]:
    """Tokens of every microbatch of every model copy, alignment included.

    Cached, because it takes a tenth of a second and compared layouts often share it.
    """
    cost = CostModel.transformer(hidden_size)
    plan = plan_microbatches(lengths, max_tokens, dims, alignment, cost)
    return [
        round_up(sum(round_up(lengths[i], alignment.sequence) for i in members), alignment.total)
        for rank in plan
        for members in rank
    ]
