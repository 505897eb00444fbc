"""Rows of the table of policy/test_model.py: a model, a layout, and overrides of the config. The
policy's log-probabilities and gradients must equal those of transformers in float64.

A `Kind` chooses what ranks compute for a row and what they are compared with. `Worlds` computes
the rows of a layout one after the other in one world of ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from megatron.core.distributed import DistributedDataParallelConfig

from helpers.oracle.policies import (
    EXACT,
    LENGTHS,
    Lengths,
    Numbers,
    OracleCase,
    accumulate,
    exact_numbers_of,
    layout,
    numbers_of,
    own_share,
    pack_all,
    tiny_config,
)
from helpers.ranks.processes import run_ranks
from megatron_grpo.config.config import Config
from megatron_grpo.config.trained_shape import trained_shape
from megatron_grpo.policy import chunks
from megatron_grpo.policy.model import Policy, build_policy, unwrapped
from megatron_grpo.policy.vision import with_features
from parallel import ParallelDims
from parallel.cpu_device import setup_device
from parallel.groups import Groups, init_groups
from parallel.packing import PackedBatch

DYNAMIC = "parallel.dynamic_context_parallel=true"
MOST_ROWS = 12
"""Largest number of rows in one world, so that no test takes minutes."""


class Kind:
    """Random texts."""

    name, bound = "", 1e-5
    lengths: ClassVar[Lengths] = LENGTHS
    overrides: tuple[str, ...] = ()
    frozen = ""
    """A part of the names of tensors that are not trained."""

    def __str__(self) -> str:
        return self.name

    def found(self, row: "Row", folder: Path, groups: Groups) -> Any:
        """A rank's results for `check`, by default log-probabilities and gradients."""
        cfg = self.config(row, folder, groups.dims)
        if row.is_exact:
            return exact_numbers_of(cfg, groups, self.pack(cfg, groups, torch.float64))
        policy = self.policy(cfg, groups)
        batches = [*with_features(self.pack(cfg, groups), policy.vision)]
        return numbers_of(policy, groups, batches)

    def config(self, row: "Row", folder: Path, dims: ParallelDims) -> Config:
        return tiny_config(folder, dims, *self.overrides, *row.overrides)

    def policy(self, cfg: Config, groups: Groups) -> Policy:
        return build_policy(cfg, trained_shape(cfg), groups)

    def pack(
        self, cfg: Config, groups: Groups, dtype: torch.dtype = torch.float32
    ) -> list[PackedBatch]:
        return own_share(pack_all(self.lengths, groups.dims, dtype=dtype), groups)

    def oracle(self, folder: Path) -> OracleCase:
        return OracleCase.of(folder, self.lengths)

    def check(self, row: "Row", worlds: "Worlds", ranks: Sequence[Any]) -> None:
        bound = EXACT if row.is_exact else self.bound
        worlds.oracle(row).check(ranks, bound, row.frozen or self.frozen)


PLAIN = Kind()


@dataclass(frozen=True)
class Row:
    """A model at a layout."""

    model: str
    layout: str
    overrides: tuple[str, ...] = ()
    kind: Kind = PLAIN
    frozen: str = ""
    is_exact: bool = False
    """In float64, which runs do not offer."""

    def __str__(self) -> str:
        short = [
            each.replace("model.megatron.", "").replace("parallel.", "") for each in self.overrides
        ]
        parts = [self.model, str(self.kind), self.layout or "one rank", *short]
        return " ".join([each for each in parts if each] + ["float64"] * self.is_exact)

    @property
    def dims(self) -> ParallelDims:
        return layout(self.layout)

    @property
    def world(self) -> tuple[ParallelDims, bool]:
        return self.dims, DYNAMIC in self.overrides


@dataclass
class Worlds:
    """Results of ranks and oracles, each computed at first use."""

    make: Callable[[str], Path]
    """Makes a model's folder."""
    rows: Sequence[Row]
    """All rows that this session tests."""
    folders: dict[str, Path] = field(default_factory=dict)
    oracles: dict[tuple[str, str], OracleCase] = field(default_factory=dict)
    found: dict[Row, list[Any]] = field(default_factory=dict)
    alone: set[tuple[ParallelDims, bool]] = field(default_factory=set)
    """Worlds in which a row has failed: each of their rows then gets its own world."""

    def folder(self, model: str) -> Path:
        if model not in self.folders:
            self.folders[model] = self.make(model)
        return self.folders[model]

    def oracle(self, row: Row) -> OracleCase:
        key = row.model, row.kind.name
        if key not in self.oracles:
            self.oracles[key] = row.kind.oracle(self.folder(row.model))
        return self.oracles[key]

    def ranks(self, row: Row) -> list[Any]:
        """Each rank's results for a row."""
        if row in self.found:
            return self.found[row]
        others = [r for r in self.rows if r.world == row.world and r not in self.found and r != row]
        together = [row] if row.world in self.alone else [row, *others][:MOST_ROWS]
        given = [(each, self.folder(each.model)) for each in together]
        seconds = 60 + 15 * len(given)
        try:
            ranks = run_ranks(row.dims.world_size, rows_on_rank, given, timeout=seconds)
        except (AssertionError, TimeoutError):
            if len(together) == 1:
                raise
            self.alone.add(row.world)
            return self.ranks(row)
        self.found |= zip(together, map(list, zip(*ranks, strict=True)), strict=True)
        return self.found[row]

    def check(self, row: Row) -> None:
        row.kind.check(row, self, self.ranks(row))


def rows_on_rank(rank: int, rows: list[tuple[Row, Path]]) -> list[Any]:
    setup_device(rank)
    dims, dynamic_context = rows[0][0].world
    groups = init_groups(dims, dynamic_context=dynamic_context)
    return [row.kind.found(row, folder, groups) for row, folder in rows]


class Long(Kind):
    """Texts long enough for RoPE's slow frequencies to turn; float32 rounds the later angles."""

    name, bound = "long", 5e-5
    lengths: ClassVar[Lengths] = [[(100, 150), (5, 32)], [(20, 100)]]


SMALL = 5_000
"""Parameters in a bucket; Megatron-Core's default gives a tiny model a single one."""


def in_buckets(size: int) -> Any:
    """A context in which gradients are summed in buckets of about `size` parameters."""
    sized = partial(DistributedDataParallelConfig, bucket_size=size)
    return patch.object(chunks, "DistributedDataParallelConfig", sized)


def bucket_groups(policy: Policy) -> list[Any]:
    return [
        group
        for chunk in policy.chunks
        for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups
    ]


OVERLAP = ("parallel.overlap_grad_reduce=true", "parallel.overlap_param_gather=true")


class Overlapped(Kind):
    """Gradients are summed during the backward: every sum has started when it ends."""

    name, overrides = "overlapped", OVERLAP

    def found(self, row: Row, folder: Path, groups: Groups) -> tuple[Numbers, float]:
        """Numbers of the second step: in the first, Megatron-Core learns which gradients exist."""
        cfg = self.config(row, folder, groups.dims)
        with in_buckets(SMALL):
            policy = self.policy(cfg, groups)
        share, started = self.pack(cfg, groups, torch.float32), []
        accumulate(policy, groups, share)
        if groups.coordinates.pipeline == 0:  # Megatron-Core has one bucket in later stages
            assert len(bucket_groups(policy)) > len(policy.chunks)
        config = unwrapped(policy.chunks[0]).config
        finish = config.finalize_model_grads_func

        def finalize(*args: Any, **kwargs: Any) -> None:
            started.extend(each.grad_reduce_handle is not None for each in bucket_groups(policy))
            finish(*args, **kwargs)

        config.finalize_model_grads_func = finalize
        numbers = numbers_of(policy, groups, share)
        return numbers, sum(started) / len(started)

    def check(self, row: Row, worlds: Worlds, ranks: Sequence[Any]) -> None:
        super().check(row, worlds, [numbers for numbers, _ in ranks])
        assert {started for _, started in ranks} == {1.0}
