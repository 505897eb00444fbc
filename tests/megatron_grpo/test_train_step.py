"""The gradient of one optimizer step does not depend on how the work is distributed.

Loss and every parameter's gradient are compared, over layouts, microbatch budgets and recipes, with
a padded, single-process computation in float64 on the `transformers` model.
"""

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_convert import read_shape
from helpers.models.tiny import tiny_model
from helpers.oracle.train_steps import (
    BETA,
    BUDGETS,
    RECIPES,
    Case,
    OffPolicy,
    Run,
    assert_equal,
    assert_logged,
    batches_of,
    config,
    on_ranks,
)
from helpers.ranks.processes import run_ranks
from megatron_grpo.algorithm.loss_function import LossFunction
from megatron_grpo.config.config import Config
from megatron_grpo.config.train import TrainConfig
from megatron_grpo.policy.model import build_policy
from megatron_grpo.timing import PhaseTimer
from megatron_grpo.train_step import accumulate_gradient, profiled_step
from parallel import ParallelDims
from parallel.cpu_device import setup_device
from parallel.groups import init_groups

# Recipes know of no family: two, one at each budget, suffice to see the gradients of another.
FAMILIES = {
    "llama tied": RECIPES,
    "qwen3 untied": {name: RECIPES[name] for name in ("grpo", "dapo")},
}
LAYOUTS = [
    ParallelDims(),
    ParallelDims(tensor=2),
    ParallelDims(pipeline=2),
    ParallelDims(pipeline=2, virtual_pipeline=2),
    ParallelDims(context=2),
    ParallelDims(data=2),
    ParallelDims(pipeline=3),
    ParallelDims(context=3),
    ParallelDims(tensor=2, context=2),
    ParallelDims(pipeline=2, data=2, num_layers_in_last_pipeline_stage=1),
    ParallelDims(context=2, data=2),
    ParallelDims(tensor=2, pipeline=2, virtual_pipeline=2),
    ParallelDims(tensor=2, context=2, pipeline=2),
    ParallelDims(tensor=4),  # more ranks than key-value heads: each head is on two of them
]
FEW_LAYOUTS = [
    ParallelDims(),
    ParallelDims(tensor=2),
    ParallelDims(pipeline=2, virtual_pipeline=2),
    ParallelDims(context=2, data=2),
    ParallelDims(tensor=2, pipeline=2, virtual_pipeline=2),
    ParallelDims(tensor=4),
]
SLOW_LAYOUTS = [
    ParallelDims(tensor=2),
    ParallelDims(pipeline=2),
    ParallelDims(context=2),
    ParallelDims(data=2),
    ParallelDims(context=3),
    ParallelDims(context=2, data=2),
    ParallelDims(tensor=2, pipeline=2, virtual_pipeline=2),
    ParallelDims(tensor=2, context=2, pipeline=2),
]
"""Faults along these axes also show at other layouts, or in the other model."""
# The sums over ranks know of no family either: another has its own in every kind of layout.
CASES = [
    *(
        pytest.param("llama tied", dims, marks=[pytest.mark.slow] if dims in SLOW_LAYOUTS else [])
        for dims in LAYOUTS[:-1]
    ),
    *(("qwen3 untied", dims) for dims in FEW_LAYOUTS),
]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: Any) -> dict[str, Case]:
    made = {}
    for name, recipes in FAMILIES.items():
        family, tied = name.split()
        folder = tmp_path_factory.mktemp(family)
        tiny_model(folder, family, tied=tied == "tied", num_hidden_layers=4)
        made[name] = Case(folder, recipes)
    return made


def _every_second(names: Iterable[str], parity: int) -> list[Run]:
    """Each recipe at one of the budgets; over the parities 0 and 1 at both.

    Layouts differ in parity. So every recipe meets every layout, every layout both budgets, and
    every recipe both budgets, at layouts that split samples over ranks and at others.
    """
    return [(name, BUDGETS[(number + parity) % 2]) for number, name in enumerate(names)]


def case_name(value: str | int | ParallelDims) -> str:
    is_layout = isinstance(value, ParallelDims)
    return f"{value} vpp({value.virtual_pipeline})" if is_layout else str(value)


@pytest.mark.parametrize(("family", "dims"), CASES, ids=case_name)
def test_loss_and_every_gradient_equal_the_float64_oracle(
    cases: dict[str, Case], family: str, dims: ParallelDims
) -> None:
    case = cases[family]
    runs = _every_second(case.recipes, LAYOUTS.index(dims))
    ranks = on_ranks(case, dims, case.experience(), runs)
    assert_equal(ranks, case.answers)
    assert_logged(ranks, case)


def test_oracle_is_met_where_tensor_ranks_have_all_tokens(cases: dict[str, Case]) -> None:
    case, dims = cases["qwen3 untied"], ParallelDims(tensor=2, context=2)
    runs = [("grpo", BUDGETS[0]), ("dapo", BUDGETS[1])]
    ranks = on_ranks(case, dims, case.experience(), runs, "parallel.sequence_parallel=false")
    assert_equal(ranks, case.answers)


@pytest.mark.long
@pytest.mark.parametrize(
    ("dims", "step"),
    [
        (ParallelDims(context=4), 3),  # recipes do not know how many ranks split a sequence
        pytest.param(ParallelDims(context=3, data=2), 1, marks=pytest.mark.slow),
        pytest.param(
            ParallelDims(tensor=2, context=2, pipeline=2, virtual_pipeline=2),
            1,
            marks=pytest.mark.slow,
        ),
    ],
    ids=case_name,
)
def test_oracle_is_met_where_fewer_ranks_split_short_sequences(
    cases: dict[str, Case], dims: ParallelDims, step: int
) -> None:
    case = cases["llama tied"]
    runs = [(name, BUDGETS[0]) for name in list(case.recipes)[::step]]
    dynamic = "parallel.dynamic_context_parallel=true"
    ranks = on_ranks(case, dims, case.experience(), runs, dynamic)
    assert_equal(ranks, case.answers)
    assert_logged(ranks, case)


@pytest.mark.parametrize(
    "family", [pytest.param("llama tied", marks=pytest.mark.slow), "qwen3 untied"]
)
def test_a_rank_whose_samples_all_failed_takes_part_with_nothing(
    cases: dict[str, Case], family: str
) -> None:
    case = cases[family]
    dims, scored = ParallelDims(context=2, data=2), [6]
    names = [name for name in ("gspo", "cispo, entropy bonus", "dapo") if name in case.recipes]
    runs = [(name, budget) for name in names for budget in BUDGETS]
    answers = {name: case.answer(case.recipes[name], scored) for name in names}
    assert_equal(on_ranks(case, dims, case.experience(scored), runs), answers)


@pytest.mark.parametrize(
    "family", [pytest.param("llama tied", marks=pytest.mark.slow), "qwen3 untied"]
)
def test_when_all_samples_failed_loss_and_gradient_are_zero(
    cases: dict[str, Case], family: str
) -> None:
    case = cases[family]
    dims = ParallelDims(context=2, data=2)
    runs = _every_second(case.recipes, 0)
    for result in on_ranks(case, dims, case.experience([]), runs):
        for loss, boxes, _ in result.values():
            assert loss == 0
            assert not any(values.any() for _, _, values in boxes)


def stale_gaps(
    rank: int, folder: Path, experience: OffPolicy, configs: list[Config]
) -> list[float]:
    """Reported gaps between the old and the current policy, by config."""
    setup_device(rank)
    groups = init_groups(ParallelDims())
    policy = build_policy(configs[0], read_shape(folder), groups)
    gaps = []
    for cfg in configs:
        batches = batches_of(policy, experience, cfg, groups)
        metrics = accumulate_gradient(policy, batches, cfg, groups, LossFunction.of(cfg.grpo), BETA)
        report = metrics.reduce(lambda tensor, op: None, cfg.grpo)
        gaps.append(report.metrics["rollout/stale_gap_mean"])
    return gaps


def test_no_sample_is_stale_where_the_engine_stands_for_the_old_policy(
    cases: dict[str, Case],
) -> None:
    case = cases["llama tied"]
    configs = [
        config(case.folder, ParallelDims(), {"loss_type": "dapo", "old_logprobs": old}, BUDGETS[1])
        for old in ("recompute", "rollout")
    ]
    [(recomputed, of_engine)] = run_ranks(1, stale_gaps, case.folder, case.experience(), configs)
    assert of_engine == 0 < recomputed


def two_steps(rank: int, train: TrainConfig) -> list[str]:
    phases: list[str] = []
    for step in (1, 2):
        timer = PhaseTimer(phases.append)
        with profiled_step(train, step, timer), timer.phase("train"):
            torch.ones(8, 8) @ torch.ones(8, 8)
    return [phase for phase in phases if phase]


def test_a_step_is_profiled_on_the_configured_ranks_and_files_may_take_time(
    tmp_path: Path,
) -> None:
    train = TrainConfig(run_dir=tmp_path, num_steps=2, profile_steps=[2], profile_ranks=[1])
    assert run_ranks(2, two_steps, train) == [["train", "train", "save"]] * 2
    [path] = (tmp_path / "profile").iterdir()
    assert path.name == "step_2_rank_1.json.gz"
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert "aten::mm" in {event.get("name") for event in events}
