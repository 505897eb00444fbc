"""A push from real ranks into real workers writes every bit where vLLM itself would.

Ranks of Megatron-Core at every kind of layout push into a chain of two vLLM engines. Each worker of
both must hold what vLLM loads from the exported folder of the same weights into a worker of its
place, and must have received its shard and nothing else.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from checkpoint_convert import read_shape
from checkpoint_convert.families import FAMILIES
from checkpoint_convert.families.multimodal import MULTIMODAL
from checkpoint_convert.vllm import EngineDims, engine_sizes
from helpers.engines.vllm_workers import NUM_ENGINES, worker_engines
from helpers.models.images import PATCH_SIZES, tiny_vision_model
from helpers.models.tiny import add_mtp_layer, mesh_for, servable_model
from helpers.models.towers import tiny_multimodal
from helpers.pushes.workers import Case, Engines, push_all
from helpers.ranks.processes import run_ranks
from parallel import ParallelDims
from parallel.weight_transfer.streams import ALIGNMENT

TP1, TP2 = EngineDims(tensor=1), EngineDims(tensor=2)
EXPERT_PARALLEL = EngineDims(tensor=2, expert_parallel=True)
DATA_PARALLEL = EngineDims(data=2, expert_parallel=True)
DENSE_LAYOUTS = [
    ParallelDims(),
    ParallelDims(tensor=2),
    ParallelDims(tensor=2, pipeline=2),
    ParallelDims(pipeline=2, virtual_pipeline=2),
    ParallelDims(tensor=2, context=2),
    ParallelDims(data=2),
]
SLOW_LAYOUTS = [DENSE_LAYOUTS[number] for number in (0, 1, 3, 5)]
"""Faults at these layouts also show along the same axes of others."""
EP2 = ParallelDims(data=2, expert=2)
MIXTURES = {name for name, family in FAMILIES.items() if family.experts is not None}


def check_pushes(
    dims: ParallelDims, cases: Sequence[Case], engines: Engines, transport: str
) -> None:
    ranks = run_ranks(dims.world_size, push_all, dims, cases, engines, transport, timeout=900)
    kinds = [(case, kind) for case in cases for kind in case.engines]
    for (case, kind), pushed in zip(kinds, zip(*ranks, strict=True), strict=True):
        where = f"{case.folder.name} at {dims} into {kind}"
        held = pushed[0][1]
        assert [len(workers) for workers in held] == [kind.num_workers] * NUM_ENGINES
        for worker in (worker for workers in held for worker in workers):
            assert not worker.differing, where
            assert not worker.unchanged, where
            assert worker.bytes_received == worker.shard_bytes > 0, where
        sent = [sent for sent, _ in pushed]
        first = sum(worker.bytes_received for worker in held[0])
        assert sum(rank.planned_bytes for rank in sent) == first, where
        gaps = ALIGNMENT * sum(rank.num_boxes for rank in sent)
        assert first <= sum(rank.bytes_handed_over for rank in sent) < first + gaps, where


def uneven_model(folder: Path, family: str, **overrides: Any) -> Path:
    """A model of five layers, which split unevenly over every pipeline."""
    return servable_model(folder, family, num_hidden_layers=5, **overrides)


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """Two engines of one worker each and two of two, into which all pushes go."""
    with ExitStack() as stack:
        yield {
            size: stack.enter_context(
                worker_engines(NUM_ENGINES, size, tmp_path_factory.mktemp("sockets"), timeout=7200)
            )
            for size in (1, 2)
        }


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """The models that the engines start with; later, an earlier push is still there."""
    folder = tmp_path_factory.mktemp("others")
    return {
        family: uneven_model(folder / family, family, tied=family == "qwen3", seed=99)
        for family in (
            *("qwen3", "qwen3_moe", "gpt_oss", "deepseek_v3", "deepseek_v32"),
            *("qwen3_next", "nemotron_h"),
        )
    }


def layout_name(dims: ParallelDims) -> str:
    return f"{dims} vpp({dims.virtual_pipeline}) ep({dims.expert})"


@pytest.mark.parametrize(
    "dims",
    [
        pytest.param(dims, marks=[pytest.mark.slow] if dims in SLOW_LAYOUTS else [])
        for dims in DENSE_LAYOUTS
    ],
    ids=layout_name,
)
def test_every_worker_holds_what_vllm_would_have_loaded(tmp_path, engines, others, dims):
    number = DENSE_LAYOUTS.index(dims)
    folder = uneven_model(tmp_path / "model", "qwen3", tied=True, seed=number)
    transport = ("auto", "network")[number % 2]
    check_pushes(dims, [Case(folder, others["qwen3"], [TP1, TP2])], engines, transport)


@pytest.mark.long
@pytest.mark.parametrize(
    "family",
    [
        pytest.param("qwen3_moe", marks=pytest.mark.slow),
        pytest.param("gpt_oss", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", marks=pytest.mark.slow),
        # Stands for qwen3_moe (its attention is qwen3's) and deepseek_v3, of which it has all; and
        # engines fuse two matrices of its indexers.
        "deepseek_v32",
        "qwen3_next",  # linear attention: engines order its rows differently
        "nemotron_h",  # the same, and one parameter has another value
    ],
)
def test_workers_hold_vllms_weights_where_ranks_share_experts(tmp_path, engines, others, family):
    folder = uneven_model(tmp_path / "model", family)
    case = Case(folder, others[family], [TP2, EXPERT_PARALLEL, DATA_PARALLEL])
    check_pushes(EP2, [case], engines, "auto")


@pytest.mark.long
@pytest.mark.parametrize(
    "family",
    [
        "deepseek_v3",
        pytest.param("glm4_moe", marks=pytest.mark.slow),  # deepseek_v3's without latents
        pytest.param("glm4_moe_lite", marks=pytest.mark.slow),  # latents and glm4_moe's layer
        "qwen3_next",
        pytest.param("qwen3_5_text", marks=pytest.mark.slow),  # qwen3_next's without experts
        pytest.param("qwen3_5_moe", marks=pytest.mark.slow),  # a text tower
    ],
)
def test_workers_hold_a_trained_layer_for_drafts(tmp_path, engines, family):
    make = tiny_multimodal if family in MULTIMODAL else servable_model
    folder, others = (
        add_mtp_layer(make(tmp_path / str(seed), family, tied=True, seed=seed), seed)
        for seed in (0, 1)
    )
    kinds, dims = [TP2], ParallelDims(pipeline=2, data=2)
    if read_shape(folder).moe is not None:
        kinds, dims = [*kinds, EXPERT_PARALLEL], replace(dims, expert=2)
    check_pushes(dims, [Case(folder, others, kinds, also="mtp")], engines, "auto")


@pytest.mark.slow
@pytest.mark.parametrize("family", PATCH_SIZES)
def test_workers_hold_a_trained_vision_tower(tmp_path, engines, family):
    folder, others = (tiny_vision_model(tmp_path / str(n), family, seed=n) for n in (0, 1))
    case = Case(folder, others, [TP1, TP2], also="vision")
    check_pushes(ParallelDims(tensor=2, data=2), [case], engines, "auto")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dims", [*DENSE_LAYOUTS, EP2], ids=layout_name)
@pytest.mark.parametrize("family", FAMILIES)
def test_workers_hold_vllms_weights_of_any_family_and_heads(tmp_path, engines, family, dims):
    if dims.expert > 1 and family not in MIXTURES:
        pytest.skip("it has no experts")
    cases = []
    for kv_heads, tied in product((1, 2, 4), (False, True)):
        name = f"{family} kv_heads({kv_heads}) tied({tied})"
        folder, others = (
            uneven_model(tmp_path / own, family, num_key_value_heads=kv_heads, tied=tied, seed=seed)
            for own, seed in ((name, 0), (f"{name} others", 1))
        )
        kinds = [TP1, TP2, *([EXPERT_PARALLEL] if family in MIXTURES else [])]
        sizes = engine_sizes(read_shape(folder), EngineDims())
        cases.append(Case(folder, others, [kind for kind in kinds if kind.tensor in sizes]))
    check_pushes(mesh_for(family, dims), cases, engines, "auto")
