"""Planned jobs, and the sequences of one optimizer step, packed into microbatches."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path

from checkpoint_convert import ModelShape
from megatron_grpo.batch.schedule import BatchSchedule
from megatron_grpo.config.config import Config
from megatron_grpo.engines.arguments import PLANNED, engine_number
from megatron_grpo.planning.card import GpuSpec
from parallel import ParallelDims
from parallel.alignment import Alignment, round_up
from parallel.microbatches import (
    CostModel,
    Plan,
    fixed_turns,
    microbatch_capacity,
    plan_microbatches,
)
from parallel.shared_prefix import PromptGroup, plan_shared_prompts
from parallel.turns import plan_turns


@dataclass(frozen=True)
class Job:
    """A config, model and GPU to plan for."""

    cfg: Config
    shape: ModelShape
    card: GpuSpec
    lengths: Sequence[int]
    """Tokens of typical sequences, ascending."""
    num_gpus: int = 0
    """0: as few whole nodes as hold the job."""


@dataclass(frozen=True, kw_only=True)
class Computed:
    """Tokens and pairs that the layers compute; a prompt that a microbatch shares counts once."""

    tokens: int
    """Without padding."""
    pairs: float
    """Attending pairs of tokens: n^2 / 2 of a sequence of n tokens."""

    @classmethod
    def of(cls, lengths: Sequence[int]) -> "Computed":
        """Sequences of these lengths, without shared prompts."""
        return cls(tokens=sum(lengths), pairs=sum(length**2 for length in lengths) / 2)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Sequences and microbatches of one optimizer step."""

    lengths: Sequence[int]
    """Tokens of each prompt with its completion."""
    computed: Computed
    microbatches: int
    """Number of microbatches of each model copy."""
    filled: int
    """Tokens of all microbatches of all copies, padding included."""
    received: int
    """Tokens whose keys and values ranks receive from other context ranks, over all copies."""
    room: int
    """Tokens that all microbatches of all copies could hold."""
    is_shared: bool
    """Whether completions of a microbatch share their prompt."""

    @property
    def padding(self) -> int:
        """Tokens that alignment adds."""
        return self.filled - self.computed.tokens


def longest_sequence(cfg: Config, shape: ModelShape) -> int:
    """Tokens of the longest prompt with the longest completion that a config allows."""
    if cfg.data.max_prompt_length is not None:
        return cfg.data.max_prompt_length + cfg.rollout.max_completion_length
    limit = engine_number(cfg.rollout, PLANNED[cfg.rollout.engine].context)
    return min(limit or shape.max_position_embeddings, cfg.train.max_tokens_per_microbatch)


def read_lengths(path: Path) -> list[int]:
    """Read one number of tokens per line, and sort them; ValueError that names an invalid line."""
    if not path.is_file():
        raise ValueError(f"{path} is no file: give one with one number of tokens per line")
    lengths = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
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


def read_completion_lengths(path: Path, cfg: Config) -> list[int]:
    """Lengths from a run's completions.jsonl, sorted; its prompts count as the longest allowed.

    ValueError for another file, or without `data.max_prompt_length`.
    """
    if (prompt := cfg.data.max_prompt_length) is None:
        raise ValueError(
            f"{path} has the tokens of completions, without those of prompts: set "
            "data.max_prompt_length"
        )
    if not path.is_file():
        raise ValueError(f"{path} is no file: give a run's completions.jsonl")
    try:
        with path.open(encoding="utf-8") as file:
            lengths = [prompt + json.loads(line)["num_tokens"] for line in file]
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f"{path} has a line without num_tokens: give a run's completions.jsonl"
        ) from None
    if not lengths:
        raise ValueError(f"{path} is empty: give the completions.jsonl of a run with steps")
    return sorted(lengths)


def spread(lengths: Sequence[int], count: int) -> list[int]:
    """`count` lengths with the distribution of `lengths` (ascending), including the longest."""
    # The middle of each of `count` equal parts.
    chosen = [lengths[len(lengths) * (2 * i + 1) // (2 * count)] for i in range(count)]
    chosen[-1] = lengths[-1]  # the longest decides what must fit
    return chosen


def workload(cfg: Config, shape: ModelShape, lengths: Sequence[int]) -> Workload:
    """One optimizer step; sequence lengths have the distribution of `lengths` (ascending).

    With `grpo.shared_prompts`, groups of sequences with neighbouring lengths share a prompt of
    `data.max_prompt_length` tokens, or of the shortest one's length; without that key nothing is
    shared. Counts the fewest microbatches: a run with a pipeline may take more, smaller ones.

    Raises ValueError if the batch arithmetic of `grpo.*` or the longest length does not work.
    """
    chosen = spread(lengths, BatchSchedule.of(cfg.grpo).minibatch_size)
    dims, limit = cfg.dims, cfg.train.max_tokens_per_microbatch
    # Only these sizes affect how sequences are grouped; of expert, only whether it is above 1, and
    # context only where its ranks take turns.
    sizes = ParallelDims(
        context=dims.context if cfg.parallel.dynamic_context_parallel else 1,
        data=dims.data,
        pipeline=dims.pipeline,
        virtual_pipeline=dims.virtual_pipeline,
        expert=dims.data if dims.expert > 1 else 1,
    )
    alignment = cfg.alignment
    cost = CostModel.transformer(shape.hidden_size, shape.attending_share)
    packing = tuple(chosen), limit, sizes, alignment, cost
    is_shared = cfg.grpo.shared_prompts and cfg.data.max_prompt_length is not None
    if is_shared:
        group = cfg.data.max_prompt_length, cfg.grpo.num_generations
        filled, computed, received = _packed_groups(*group, *packing)
    else:
        filled, computed, received = _packed(*packing)
    return Workload(
        lengths=chosen,
        computed=computed,
        microbatches=len(filled) // dims.data,
        filled=sum(filled),
        received=received,
        room=limit * len(filled),
        is_shared=is_shared,
    )


Packed = tuple[list[int], Computed, int]
"""(tokens of every turn of every model copy with padding, their computation, tokens received from
context ranks).

Packing takes 0.1 s or more, and compared layouts often share it: it is cached."""


@lru_cache(maxsize=1024)
def _planned(lengths: tuple[int, ...], capacity: int, dims: ParallelDims, cost: CostModel) -> Plan:
    """Plan of aligned lengths, cached: layouts of different alignment often share it."""
    return plan_microbatches(lengths, capacity, dims, Alignment(), cost, search=False)


@lru_cache(maxsize=1024)
def _packed(
    lengths: tuple[int, ...],
    max_tokens: int,
    dims: ParallelDims,
    alignment: Alignment,
    cost: CostModel,
) -> Packed:
    """Pack sequences without shared prompts."""
    if dims.context > 1:  # context ranks take turns; in all other layouts `workload` passes 1
        plan = plan_turns(lengths, max_tokens, dims, alignment, cost, search=False)
    else:
        capacity = microbatch_capacity(lengths, max_tokens, alignment)
        aligned = tuple(round_up(length, alignment.sequence) for length in lengths)
        plan = fixed_turns(_planned(aligned, capacity, dims, cost), alignment.context)
    filled, received = [], 0
    for turn in chain.from_iterable(plan):
        own = alignment.for_context(turn.context_size)
        tokens = [sum(round_up(lengths[i], own.sequence) for i in m) for m in turn.microbatches]
        filled.append(sum(round_up(each, own.total) for each in tokens))
        received += filled[-1] * (turn.context_size - 1)
    return filled, Computed.of(lengths), received


@lru_cache(maxsize=1024)
def _packed_groups(
    max_prompt_length: int,
    num_generations: int,
    lengths: tuple[int, ...],
    max_tokens: int,
    dims: ParallelDims,
    alignment: Alignment,
    cost: CostModel,
) -> Packed:
    """Pack groups of `num_generations` sequences with a shared prompt each."""
    groups = []
    for first in range(0, len(lengths), num_generations):
        members = range(first, min(first + num_generations, len(lengths)))
        prompt = min(max_prompt_length, lengths[first])  # the shortest of the group
        responses = {i: lengths[i] - prompt for i in members}
        groups.append(PromptGroup(num_prompt_tokens=prompt, responses=responses))
    plan = plan_shared_prompts(groups, max_tokens, dims, alignment, cost, search=False)
    multiple, filled, tokens, squares = alignment.sequence, [], 0, 0
    for microbatch in chain.from_iterable(plan):
        parts: dict[int, list[int]] = {}
        for i in microbatch:
            parts.setdefault(i // num_generations, []).append(i)
        length = sum(groups[at].length(members, multiple) for at, members in parts.items())
        filled.append(round_up(length, alignment.total))
        tokens += sum(groups[at].num_tokens(members, multiple) for at, members in parts.items())
        squares += sum(groups[at].squares(members, multiple) for at, members in parts.items())
    computed = Computed(tokens=tokens, pairs=squares / 2)
    return filled, computed, sum(filled) * (alignment.context - 1)


def forwards_alone(cfg: Config) -> float:
    """Forwards per step that no backward follows: of the policy before training, of the reference.

    Each is made once per generation and serves all `grpo.num_iterations`.
    """
    old = cfg.grpo.num_old_passes / cfg.grpo.steps_per_generation
    return (old + (cfg.grpo.beta > 0)) / cfg.grpo.num_iterations


def in_flight(stage: int, pipeline: int, virtual: int, microbatches: int) -> Sequence[int]:
    """Largest number of forwards that await their backward, for each model chunk of a stage.

    1F1B (Narayanan et al., arXiv 2104.04473): `pipeline` - `stage` microbatches. Interleaved: the
    forwards that Megatron-Core's schedule runs before its first backward, plus one.
    """
    if virtual == 1:
        return [min(microbatches, pipeline - stage)]
    counts = [0] * virtual
    # `get_schedule_table` runs groups of `pipeline` microbatches through one chunk after another.
    for number in range(min(warm_up(stage, pipeline, virtual) + 1, microbatches * virtual)):
        counts[number // pipeline % virtual] += 1
    return counts


def warm_up(stage: int, pipeline: int, virtual: int) -> int:
    """Forwards of chunks that an interleaved stage runs before its first backward: as
    `get_pp_rank_microbatches` of Megatron-Core."""
    return (pipeline - stage - 1) * 2 + (virtual - 1) * pipeline
