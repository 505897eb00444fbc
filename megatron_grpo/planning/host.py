"""Host memory that relieves GPUs, and the time of its copies over the bus.

Ranks move state by `train.offload`, optimizer and activations by their own keys; sleeping engines
and reward models move the weights that no push brings.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from checkpoint_convert import ModelShape
from megatron_grpo.config.config import Config
from megatron_grpo.config.offload import (
    NOT_COPIED,
    Part,
    Phase,
    parts_away,
    parts_copied,
    parts_moved,
    words,
)
from megatron_grpo.planning.activations import offloaded_bytes
from megatron_grpo.planning.card import GpuSpec
from megatron_grpo.planning.engine_memory import EngineBytes
from megatron_grpo.planning.memory import RESERVE, StageMemory, shared_models
from megatron_grpo.planning.rows import facts, table
from megatron_grpo.planning.state import StateBytes, part_bytes
from megatron_grpo.planning.step_time import push_link
from megatron_grpo.planning.workload import Job, longest_sequence

LIMIT_CHOICES = "hint: rollout.sglang.max_total_tokens=N limits the cached tokens of each GPU"


@dataclass(frozen=True, kw_only=True)
class HostUse:
    """Memory of the node with the fullest ranks, and their copies in each generation.

    Times are at the full rate of the bus.
    """

    leaving: int
    """Bytes that a rank copies to its host before a generation. A reference that never changes is
    copied only once, and not counted."""
    leaving_seconds: float
    """Time of `leaving`."""
    hidden_leaving_seconds: float
    """Part of `leaving_seconds` during the push, which reads the same weights."""
    moved: int
    """Bytes that a rank copies back after a generation."""
    seconds: float
    """Time of `moved`."""
    hidden_seconds: float
    """Part of `seconds` that log-probability passes hide, if they take longer."""
    page_locked: int
    """Page-locked bytes of a node for `moved`, from the start on."""
    asleep: int
    """Bytes of a node for the weights of its engines, from their first sleep on."""
    asleep_seconds: float
    """Time of an engine's weights each way: to the host before a step, back after it."""
    reward_models: int
    """At most: bytes of rank 0's node for the weights of reward models that sleep."""
    scoring_seconds: float
    """Time of a reward model's weights each way: to GPUs before scoring, back after it."""
    optimizer: int
    """Bytes of a node for the optimizer's state that stays there: `optimizer_cpu_offload`."""
    activations: int
    """At most: bytes of a node for activations that wait for their backward."""
    saving: int
    """At most: bytes of a node for copies of a checkpoint's content, from the first save on. State
    that stays on the host (`optimizer`) is written without a copy."""
    limit: int
    """Bytes of a node's memory that a plan may use."""

    @property
    def parts(self) -> dict[str, int]:
        """Bytes of a node by purpose, which names the key behind it."""
        return {
            "train.offload": self.page_locked,
            "optimizer.optimizer_cpu_offload": self.optimizer,
            "engines that sleep with lora.sync adapter": self.asleep,
            "reward models that sleep, with share_gpus": self.reward_models,
            "model.megatron.offload_modules": self.activations,
            "a checkpoint that is being written": self.saving,
        }

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def need(self) -> str:
        """GB of a node in words."""
        parts = [f"{size / 1e9:.1f} for {what}" for what, size in self.parts.items() if size]
        return (
            f"a node needs {self.total / 1e9:.1f} GB of host memory, and may use "
            f"{self.limit / 1e9:.1f}: {', '.join(parts)}"
        )

    @property
    def fits(self) -> bool:
        return self.total <= self.limit


def host_use(
    job: Job, states: Sequence[StateBytes], microbatches: int, colocated: EngineBytes | None
) -> HostUse | None:
    """Memory of nodes for ranks, a `colocated` engine and reward models; None if nothing moves."""
    cfg, card = job.cfg, job.card
    copied, on_host = parts_copied(cfg.offload), colocated.on_host if colocated else 0
    activations = max(
        offloaded_bytes(cfg, job.shape, stage, microbatches) for stage in range(len(states))
    )
    models = shared_models(cfg, card)
    optimizer = max(each.host for each in states)
    if not (copied or on_host or models or optimizer or activations):
        return None
    moved, state = max(((part_bytes(each, copied), each) for each in states), key=lambda m: m[0])
    saved: list[Part] = ["weights", "optimizer"]
    if cfg.grpo.sync_ref_model:
        saved.append("reference")
    num_ranks = min(cfg.dims.world_size, card.per_node)
    workers = min(cfg.num_engines * cfg.rollout.gpus_per_engine, card.per_node)
    # Log-probability passes need no optimizer: its way back hides behind them.
    passes = cfg.grpo.num_old_passes > 0 or cfg.grpo.beta > 0
    # What no step changes is copied to the host once.
    leaving = part_bytes(
        state, [part for part in copied if part != "reference" or cfg.grpo.sync_ref_model]
    ) - state.frozen * ("weights" in copied)
    return HostUse(
        leaving=leaving,
        leaving_seconds=leaving / card.host_rate,
        hidden_leaving_seconds=_hidden_by_push(cfg, state, card, colocated),
        moved=moved,
        seconds=moved / card.host_rate,
        hidden_seconds=passes * ("optimizer" in copied) * state.optimizer / card.host_rate,
        page_locked=num_ranks * moved,
        asleep=workers * on_host,
        asleep_seconds=colocated.weights / card.host_rate if colocated and on_host else 0.0,
        # Twice here and below: torch rounds page-locked allocations up to a power of two.
        reward_models=sum(2 * len(each.ranks) * each.weights for each in models),
        scoring_seconds=max((each.weights for each in models), default=0) / card.host_rate,
        optimizer=num_ranks * optimizer,
        activations=num_ranks * 2 * activations,
        saving=num_ranks * (part_bytes(state, saved) - state.frozen),
        limit=round((1 - RESERVE) * card.host_memory),
    )


def _hidden_by_push(
    cfg: Config, state: StateBytes, card: GpuSpec, colocated: EngineBytes | None
) -> float:
    """Seconds of weights' way to the host that overlap with the push."""
    if colocated is None or "weights" not in parts_moved(cfg.offload):
        return 0.0
    push = push_link(colocated.pushed, card, in_node=cfg.dims.world_size <= card.per_node)
    return min(push.seconds, state.trained / card.host_rate)


def host_blocks(
    cfg: Config, host: HostUse | None, stage: StageMemory, card: GpuSpec
) -> Iterator[list[str]]:
    """Places of the fullest stage's state in each phase, copies over the bus, and host memory."""
    if parts_moved(cfg.offload):
        title = f"train.offload {words(cfg.offload)}: GB of stage {stage.stage} in each phase"
        yield [title, *(_phase_row(cfg, stage, phase) for phase in stage.phases)]
    if host is None:
        return
    copies = (
        ("to the host", host.leaving_seconds, host.hidden_leaving_seconds, "the push", host.moved),
        ("back", host.seconds, host.hidden_seconds, "log-probability passes", host.moved),
        ("sleeping engines, each way", host.asleep_seconds, 0.0, "-", host.asleep),
        ("reward models, each way", host.scoring_seconds, 0.0, "-", host.reward_models),
    )
    rows = [["copies per generation and GPU", "bytes", "least time", "hidden", "by"]]
    rows += [
        [purpose, _gb(seconds * card.host_rate), f"{seconds:.2f} s", f"{hidden:.2f} s", what]
        for purpose, seconds, hidden, what, num_bytes in copies
        if num_bytes
    ]
    if len(rows) > 1:
        yield [*table(rows, left=(0, 4)), f"at the bus's {card.host_rate / 1e9:g} GB/s"]
    sizes = [(_gb(size), what) for what, size in host.parts.items() if size]
    sums = (_gb(host.total), "sum"), (_gb(host.limit), "limit")
    yield facts("host memory of a node", [*sizes, *sums])


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.1f} GB"


def choice_lines(
    cfg: Config, shape: ModelShape, lengths: Sequence[int], engine: EngineBytes | None
) -> list[str]:
    """Lines on the memory of replayed indexer choices; `lengths` are of a step."""
    if not cfg.rollout.indexer_replay or shape.indexer is None:
        return []
    numbers, num_tokens = shape.num_layers * shape.indexer.topk, sum(lengths)
    itemsize = 2 if longest_sequence(cfg, shape) <= 1 << 15 else 4
    num_tokens *= cfg.grpo.steps_per_generation
    whole = num_tokens * numbers * itemsize
    own = whole / (cfg.dims.data * cfg.dims.context * cfg.dims.pipeline)
    packed = whole / (cfg.dims.data * cfg.grpo.steps_per_generation)
    rows = [
        (_gb(whole), f"rank 0's host, for {num_tokens:,} tokens of a generation"),
        (_gb(packed), "each rank's host, while it packs an optimizer batch"),
        (_gb(own), "each rank's GPU"),
    ]
    if engine:  # SGLang's, in int32
        limit = cfg.rollout.sglang.get("max_total_tokens", engine.cached_tokens)
        cached = min(engine.cached_tokens, limit * cfg.rollout.data_parallel_size)
        place = f"an engine's host, page-locked, for {cached:,} cached tokens"
        rows.append((_gb(cached * numbers * 4), place))
    lines = facts("rollout.indexer_replay, not counted above", rows)
    return [*lines, *([LIMIT_CHOICES] if engine else [])]


def _phase_row(cfg: Config, stage: StageMemory, phase: Phase) -> str:
    away = parts_away(cfg.train.offload, phase)
    on_host = [part for part in away if part not in NOT_COPIED and part_bytes(stage.state, [part])]
    freed = [part for part in away if part in NOT_COPIED]
    places = [f"{', '.join(on_host)} on the host"] if on_host else []
    places += [f"{', '.join(freed)} freed"] if freed else []
    return f"  {phase:<18}{stage.total_in(phase) / 1e9:>7.1f}  {'; '.join(places)}".rstrip()
