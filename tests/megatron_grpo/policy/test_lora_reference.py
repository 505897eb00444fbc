"""The reference that follows a policy with adapters: the base with a copy of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoint_convert.formats.torch_dist import read_chunks
from helpers.models.tiny import tiny_model
from helpers.oracle.adapters import (
    Boxes,
    boxes_of,
    options,
    oracle,
    set_b,
    take_step,
    whole,
)
from helpers.oracle.policies import (
    LENGTHS,
    checkpoints_of,
    logprobs_of,
    pack_all,
    start_policy,
    tiny_config,
)
from helpers.ranks.processes import run_ranks
from megatron_grpo.checkpoints.state import REFERENCE
from megatron_grpo.checkpoints.trainer_state import TrainerState
from megatron_grpo.planning.state import state_bytes
from megatron_grpo.policy.model import Policy
from megatron_grpo.policy.reference import Reference, reference_of
from parallel import ParallelDims
from parallel.groups import Groups

FOLLOWS = ("grpo.sync_ref_model=true", "grpo.ref_model_sync_steps=2")
TENSOR = ParallelDims(tensor=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "llama", tied=True)


def start_both(
    rank: int, folder: Path, dims: ParallelDims, *overrides: str
) -> tuple[Policy, Reference, Groups]:
    given = [*options("llama"), *FOLLOWS, *overrides]
    policy, groups = start_policy(rank, folder, dims, *given)
    set_b(policy)
    return policy, reference_of(policy, tiny_config(folder, dims, *given), groups), groups


def follow(rank: int, folder: Path, alpha: float) -> dict[str, Any]:
    """The adapters of four steps, and what both models compute after them."""
    option = f"grpo.ref_model_mixup_alpha={alpha}"
    policy, reference, groups = start_both(rank, folder, TENSOR, option)
    values = [boxes_of(policy, policy.adapters.parameters())]
    for step in range(1, 5):
        take_step(policy, groups)
        reference.follow(policy, step)
        values.append(boxes_of(policy, policy.adapters.parameters()))
    batches = pack_all(LENGTHS, TENSOR)
    return {
        "values": values,
        "reference": logprobs_of(reference, groups, batches),
        "policy": logprobs_of(policy, groups, batches),
    }


@pytest.mark.long
@pytest.mark.parametrize("alpha", [0.3, 1.0])
def test_it_computes_with_the_mixture_of_every_second_step(folder, alpha):
    ranks = run_ranks(2, follow, folder, alpha)
    first, _, second, _, last = map(whole, zip(*(rank["values"] for rank in ranks), strict=True))
    mixed = {name: values.double() for name, values in first.items()}
    for trained in (second, last):
        mixed = {name: alpha * trained[name] + (1 - alpha) * mixed[name] for name in mixed}
    for model, values in (("reference", mixed), ("policy", last)):
        expected, base, *_ = oracle(folder, values, scale=2.0)
        assert max((a - b).abs().max() for a, b in zip(expected, base, strict=True)) > 1e-2
        for rank in ranks:
            assert rank[model].keys() == set(range(len(expected)))
            for index, found in rank[model].items():
                torch.testing.assert_close(found.double(), expected[index], atol=1e-5, rtol=0)


HALF = "model.dtype=bfloat16"


def state(policy: Policy, reference: Reference) -> list[Boxes]:
    return [
        boxes_of(policy, values)
        for values in (policy.adapters.parameters(), reference.averaged_weights)
    ]


def save(rank: int, folder: Path, dims: ParallelDims, run: Path) -> list[list[Boxes]]:
    """State of both when they are saved, and two steps later."""
    policy, reference, groups = start_both(rank, folder, dims, HALF)
    cfg = tiny_config(folder, dims, *options("llama"), *FOLLOWS, HALF)
    averaged = reference.averaged_weights.values()
    assert {each.dtype for each in averaged} == {torch.float32}
    assert state_bytes(cfg, policy.shape, rank).reference == sum(each.nbytes for each in averaged)
    for step in (1, 2):
        take_step(policy, groups)
        reference.follow(policy, step)
    checkpoints = checkpoints_of(run, policy, folder, dims, reference=reference)
    checkpoints.save(TrainerState(step=2), {})
    checkpoints.wait()
    return [state(policy, reference), go_on(policy, reference, groups)]


def load(rank: int, folder: Path, dims: ParallelDims, run: Path) -> list[list[Boxes]]:
    policy, reference, groups = start_both(rank, folder, dims, HALF)
    assert checkpoints_of(run, policy, folder, dims, reference=reference).load().step == 2
    return [state(policy, reference), go_on(policy, reference, groups)]


def go_on(policy: Policy, reference: Reference, groups: Groups) -> list[Boxes]:
    for step in (3, 4):
        take_step(policy, groups)
        reference.follow(policy, step)
    return state(policy, reference)


def wholes(ranks: list[list[list[Boxes]]]) -> list[dict[str, Tensor]]:
    """Adapters of policy and reference when they were saved or loaded, and two steps later."""
    states = [[each for when in rank for each in when] for rank in ranks]
    return [whole(list(each)) for each in zip(*states, strict=True)]


@pytest.mark.long
def test_it_resumes_with_the_same_bits_and_over_layouts(folder, tmp_path):
    saved = wholes(run_ranks(2, save, folder, TENSOR, tmp_path))
    assert any(not torch.equal(values, saved[3][name]) for name, values in saved[1].items())
    loaded = wholes(run_ranks(2, load, folder, TENSOR, tmp_path))
    elsewhere = wholes(run_ranks(2, load, folder, ParallelDims(pipeline=2), tmp_path))
    for found in (loaded, elsewhere[:2]):
        for ours, theirs in zip(found, saved, strict=False):
            assert all(torch.equal(values, theirs[name]) for name, values in ours.items())
    keys = read_chunks(tmp_path / "checkpoints/step_2").shapes.keys()
    assert {REFERENCE + name for name in saved[1]} == {x for x in keys if x.startswith(REFERENCE)}
