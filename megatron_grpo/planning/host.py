"""What `train.offload` takes of the hosts: their memory, and the time of the bus."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_grpo.config.config import Config
from megatron_grpo.config.offload import NOT_COPIED, Part, Phase, parts_away, parts_copied
from megatron_grpo.planning.card import GpuSpec
from megatron_grpo.planning.memory import RESERVE, StageMemory
from megatron_grpo.planning.state import StateBytes, part_bytes


@dataclass(frozen=True, kw_only=True)
class HostUse:
    """The memory of a node whose ranks hold the most, and their copies in each generation."""

    moved: int
    """Bytes that a rank copies to its host before a generation, and back after it."""
    seconds: float
    """Time of one of these two copies at the full rate of the bus."""
    hidden_seconds: float
    """Part of the time back that log-probability passes hide, if they take longer."""
    page_locked: int
    """Bytes of a node for what is moved, from the start on."""
    saving: int
    """Bytes of a node for copies of what a checkpoint holds, from the first save on: at most."""
    limit: int
    """Bytes of a node's memory that a plan may use."""

    @property
    def total(self) -> int:
        """Bytes of a node that are needed."""
        return self.page_locked + self.saving

    @property
    def fits(self) -> bool:
        """Whether no node runs out of memory."""
        return self.total <= self.limit


def host_use(cfg: Config, states: Sequence[StateBytes], card: GpuSpec) -> HostUse | None:
    """What `train.offload` takes of the nodes; None if nothing is moved."""
    copied = parts_copied(cfg.offload)
    if not copied:
        return None
    moved, state = max(((part_bytes(each, copied), each) for each in states), key=lambda m: m[0])
    saved: list[Part] = ["weights", "optimizer"]
    if cfg.grpo.sync_ref_model:
        saved.append("reference")
    num_ranks = min(cfg.dims.world_size, card.per_node)
    # Then the GPU computes while the optimizer's state comes back.
    passes = cfg.grpo.num_old_passes > 0 or cfg.grpo.beta > 0
    return HostUse(
        moved=moved,
        seconds=moved / card.host_rate,
        hidden_seconds=passes * state.optimizer / card.host_rate,
        page_locked=num_ranks * moved,
        saving=num_ranks * part_bytes(state, saved),
        limit=round((1 - RESERVE) * card.host_memory),
    )


def host_lines(cfg: Config, host: HostUse, stage: StageMemory, card: GpuSpec) -> list[str]:
    """Where the state of the fullest stage is in each phase, and what that takes of its host."""
    offload = cfg.train.offload
    rows = [f"train.offload {offload}: stage {stage.stage} in each phase, in GB"]
    rows += [_phase_row(cfg, stage, phase) for phase in stage.phases]
    rows.append(
        f"a rank copies {host.moved / 1e9:.1f} GB to its host before a generation and back after "
        f"it: at least {host.seconds:.2f} s each way at {card.host_rate / 1e9:g} GB/s, of which "
        f"log-probability passes hide {host.hidden_seconds:.2f} s on the way back"
    )
    rows.append(
        f"a node of {card.host_memory / 1e9:,.0f} GB holds {host.page_locked / 1e9:.1f} GB of it "
        f"and, for a checkpoint that is being written, up to {host.saving / 1e9:.1f} GB; it may "
        f"use {host.limit / 1e9:,.0f}"
    )
    return rows


def _phase_row(cfg: Config, stage: StageMemory, phase: Phase) -> str:
    away = parts_away(cfg.train.offload, phase)
    on_host = [part for part in away if part not in NOT_COPIED and part_bytes(stage.state, [part])]
    freed = [part for part in away if part in NOT_COPIED]
    places = [f"{', '.join(on_host)} on the host"] if on_host else []
    places += [f"{', '.join(freed)} freed"] if freed else []
    return f"  {phase:<18}{stage.total_in(phase) / 1e9:>7.1f}  {'; '.join(places)}".rstrip()


def too_little_host_memory(cfg: Config, host: HostUse) -> str:
    """Why a plan does not fit its hosts, and what to do."""
    less = "optimizer or none" if cfg.train.offload == "all" else "none"
    return (
        f"a node needs {host.total / 1e9:.1f} GB of host memory with train.offload "
        f"{cfg.train.offload}, but may use {host.limit / 1e9:.1f}: set train.offload to {less}, "
        "or use more nodes"
    )
