"""The reference that follows the policy: its values, its checkpoints, and when it is used."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from checkpoint_convert import read_shape
from checkpoint_convert.weights import read_weights
from helpers.models.conversions import read_checkpoint
from helpers.models.tiny import tiny_model
from helpers.oracle.policies import (
    LENGTHS,
    Boxes,
    accumulate,
    assert_equal_tensors,
    boxes_of,
    checkpoints_of,
    own_share,
    pack_all,
    start_policy,
    tiny_config,
)
from helpers.ranks.processes import run_ranks
from helpers.runs.jobs import NUM_RANKS, Runs, assert_same_run
from helpers.runs.sabotage import SpoilGradient
from helpers.runs.train import read_metrics
from megatron_grpo.checkpoints.state import REFERENCE, num_bytes_saved
from megatron_grpo.checkpoints.trainer_state import TrainerState
from megatron_grpo.policy.model import Model, Policy
from megatron_grpo.policy.reference import Reference, build_reference
from parallel import ParallelDims

NUM_STEPS = 4
MOVES = ("grpo.sync_ref_model=true", "grpo.ref_model_sync_steps=2")
EVERY_STEP = ("grpo.sync_ref_model=true", "grpo.ref_model_sync_steps=1")
HALF = "grpo.ref_model_mixup_alpha=0.5"


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def folders(request, tmp_path_factory) -> list[Path]:
    """The model that a run starts from, and the policy after each of its steps."""
    at = tmp_path_factory.mktemp(request.param)
    tied = request.param == "qwen3"
    return [
        tiny_model(at / str(seed), request.param, tied=tied, seed=seed)
        for seed in range(NUM_STEPS + 1)
    ]


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> list[Path]:
    """A model to start from, and another for the policy to become."""
    at = tmp_path_factory.mktemp("two")
    return [tiny_model(at / str(seed), "qwen3", seed=seed) for seed in range(2)]


def start_both(
    rank: int, folder: Path, dims: ParallelDims, *overrides: str
) -> tuple[Policy, Reference]:
    policy, groups = start_policy(rank, folder, dims, *overrides)
    cfg = tiny_config(folder, dims, *overrides)
    return policy, build_reference(cfg, read_shape(folder), groups)


def become(policy: Policy, folder: Path) -> None:
    """Set the policy's weights as if training steps had led there."""
    read_weights(folder, policy.shape, policy.layout, policy.parameters())


def weights_of(model: Model) -> dict[str, Tensor]:
    return {name: values.detach().clone() for name, values in model.parameters().items()}


# The mixture


def boxes_after_steps(rank: int, folders: list[Path], dims: ParallelDims) -> Boxes:
    policy, reference = start_both(rank, folders[0], dims, *MOVES, "grpo.ref_model_mixup_alpha=0.3")
    for step, folder in enumerate(folders[1:], start=1):
        become(policy, folder)
        reference.follow(policy, step)
    return boxes_of(reference, reference.parameters(), replicas=True)


@pytest.mark.parametrize(
    "dims",
    [ParallelDims(pipeline=2), ParallelDims(data=2), ParallelDims(tensor=2, context=2)],
    ids=str,
)
def test_reference_is_the_same_mixture_at_every_layout(folders, dims):
    """Mixed at every second of four steps; at each the policy is the model of another seed."""
    expected: dict[str, Tensor] = {}
    for step, folder in enumerate(folders):
        for name, policy in load_file(folder / "model.safetensors").items():
            if step == 0:
                expected[name] = policy.double()
            elif step % 2 == 0:
                expected[name] = 0.3 * policy.double() + 0.7 * expected[name]
    for boxes in run_ranks(dims.world_size, boxes_after_steps, folders, dims):
        for name, box, values in boxes:
            want = expected[name][box.slices].float().reshape(values.shape)
            torch.testing.assert_close(values, want, rtol=1e-6, atol=1e-7)


def follow_in_small_parts(rank: int, two: list[Path]) -> list[dict[str, Tensor]]:
    options = ("model.dtype=bfloat16", *EVERY_STEP, "grpo.ref_model_mixup_alpha=0.01")
    policy, reference = start_both(rank, two[0], ParallelDims(), *options)
    begin = weights_of(reference)
    for name, values in policy.parameters().items():  # a policy that has moved a little
        values.data.copy_(begin[name] * 1.02)
    for step in range(1, 201):
        reference.follow(policy, step)
    return [begin, weights_of(policy), weights_of(reference)]


def test_reference_keeps_a_small_alpha_in_bfloat16(two):
    """In bfloat16 alone, a hundredth of two hundredths would round to nothing at each addition."""
    ((begin, policy, reference),) = run_ranks(1, follow_in_small_parts, two)
    for name, got in reference.items():
        assert got.dtype == torch.bfloat16
        there, rest = policy[name].double(), 0.99**200 * (begin[name] - policy[name]).double()
        torch.testing.assert_close(got.double(), there + rest, rtol=2**-8, atol=0)
        alone = 0.99 * begin[name].float() + 0.01 * policy[name].float()
        assert torch.equal(alone.bfloat16(), begin[name])


def refresh(rank: int, two: list[Path], dtype: str) -> list[bool]:
    options = (f"model.dtype={dtype}", *MOVES, "grpo.ref_model_mixup_alpha=1.0")
    policy, groups = start_policy(rank, two[0], ParallelDims(), *options)
    reference, frozen = (
        build_reference(tiny_config(two[0], ParallelDims(), *given), policy.shape, groups)
        for given in (options, options[:1])
    )
    begin = weights_of(reference)
    become(policy, two[1])
    moved = weights_of(policy)
    reference.follow(policy, 1)
    stays = weights_of(reference)
    for each in (reference, frozen):
        each.follow(policy, 2)
    for values in policy.parameters().values():
        values.data.zero_()
    after, not_followed = weights_of(reference), weights_of(frozen)
    return [
        all(torch.equal(stays[name], begin[name]) for name in begin),
        all(torch.equal(after[name], moved[name]) for name in begin),
        all(torch.equal(not_followed[name], begin[name]) for name in begin),
        not any(values.requires_grad for values in reference.parameters().values()),
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reference_is_a_copy_and_a_frozen_one_stays(two, dtype):
    assert run_ranks(1, refresh, two, dtype) == [[True] * 4]


# Checkpoints

MIXED = ("model.dtype=bfloat16", *MOVES, "grpo.ref_model_mixup_alpha=0.3")


def save_moved(rank: int, two: list[Path], run: Path, dims: ParallelDims) -> int:
    """The reported bytes of this rank's part."""
    policy, groups = start_policy(rank, two[0], dims, *MIXED)
    reference = build_reference(tiny_config(two[0], dims, *MIXED), policy.shape, groups)
    accumulate(policy, groups, own_share(pack_all(LENGTHS, dims), groups))
    policy.optimizer.step()
    become(policy, two[1])
    reference.follow(policy, 2)
    save(run, policy, reference, two[0], dims)
    return num_bytes_saved(policy, reference)


def save(run: Path, policy: Policy, reference: Reference, folder: Path, dims: ParallelDims) -> None:
    checkpoints = checkpoints_of(run, policy, folder, dims, *MIXED, reference=reference)
    checkpoints.save(TrainerState(step=2), {})
    checkpoints.wait()


def load_and_save(
    rank: int, two: list[Path], run: Path, dims: ParallelDims, again: Path
) -> tuple[bool, bool]:
    """Whether the reference is the rounded loaded mixture, and whether steps still change it."""
    policy, reference = start_both(rank, two[0], dims, *MIXED)
    checkpoints_of(run, policy, two[0], dims, *MIXED, reference=reference).load()
    loaded = weights_of(reference)
    rounded = {name: values.bfloat16() for name, values in reference.averaged_weights.items()}
    save(again, policy, reference, two[0], dims)
    reference.follow(policy, 4)
    moved = weights_of(reference)
    return (
        all(torch.equal(values, rounded[name]) for name, values in loaded.items()),
        not any(torch.equal(values, moved[name]) for name, values in loaded.items()),
    )


def tensors_in(run: Path) -> dict[str, Tensor]:
    """All full tensors. `read_checkpoint` checks that every element is there exactly once."""
    found = read_checkpoint(run / "checkpoints" / "step_2")
    # The vocabulary of 250 has padding by layout.
    return {k: v[:250] if "embedding" in k or "output" in k else v for k, v in found.items()}


def test_reference_comes_back_at_another_layout_bit_for_bit(two, tmp_path):
    """The policy is in bfloat16; other ranks cut its float32 masters and moments elsewhere."""
    dims, other = ParallelDims(tensor=2, data=2), ParallelDims(pipeline=2, context=2)
    sizes = run_ranks(4, save_moved, two, tmp_path / "run", dims)
    everything = read_checkpoint(tmp_path / "run" / "checkpoints" / "step_2")
    assert sum(sizes) == sum(values.nbytes for values in everything.values())
    results = run_ranks(4, load_and_save, two, tmp_path / "run", other, tmp_path / "again")
    assert results == [(True, True)] * 4
    before, after = tensors_in(tmp_path / "run"), tensors_in(tmp_path / "again")
    reference = {key for key in before if key.startswith(REFERENCE)}
    weights = {key.removeprefix(REFERENCE) for key in reference}
    assert {key for key, values in before.items() if values.dtype != torch.float32} == weights
    assert_equal_tensors(after, before)
    assert len(before) == 5 * len(weights)  # and the mixture, master and two moments of each


def save_and_load_otherwise(
    rank: int, two: list[Path], run: Path, saves: tuple[str, ...], loads: tuple[str, ...]
) -> str:
    dims = ParallelDims()
    policy, groups = start_policy(rank, two[0], dims)
    before, after = (
        build_reference(tiny_config(two[0], dims, *moves), policy.shape, groups)
        for moves in (saves, loads)
    )
    save(run, policy, before, two[0], dims)
    with pytest.raises(ValueError) as raised:
        checkpoints_of(run, policy, two[0], dims, reference=after).load()
    return str(raised.value)


@pytest.mark.parametrize(
    ("saves", "loads", "error"),
    [
        ((), MOVES, "holds no weights of a reference.*sync_ref_model is true: set it to false"),
        (MOVES, (), "holds the weights of a reference.*sync_ref_model is false: set it to true"),
    ],
    ids=["wanted", "not wanted"],
)
def test_checkpoint_of_another_kind_of_reference_is_reported(two, tmp_path, saves, loads, error):
    [message] = run_ranks(1, save_and_load_otherwise, two, tmp_path, saves, loads)
    assert re.search(error, message), message


def start_from(rank: int, two: list[Path], run: Path, new: Path) -> tuple[bool, bool]:
    """Whether a new run has its own reference, and the policy of the run that it starts from."""
    dims = ParallelDims(data=2)
    policy, groups = start_policy(rank, two[0], dims, *MIXED)
    cfg = tiny_config(two[0], dims, *MIXED)
    moved, reference = (build_reference(cfg, policy.shape, groups) for _ in range(2))
    initial = weights_of(reference)
    become(policy, two[1])
    moved.follow(policy, 2)
    save(run, policy, moved, two[0], dims)
    trained = weights_of(policy)
    become(policy, two[0])
    start = f"train.init_from={run}"
    checkpoints_of(new, policy, two[0], dims, *MIXED, start, reference=reference).load()
    return (
        all(torch.equal(values, initial[name]) for name, values in weights_of(reference).items()),
        all(torch.equal(values, trained[name]) for name, values in weights_of(policy).items()),
    )


def test_reference_is_its_own_in_a_run_that_starts_from_another(two, tmp_path):
    results = run_ranks(2, start_from, two, tmp_path / "run", tmp_path / "new")
    assert results == [(True, True)] * 2


# Whole runs


@pytest.fixture(scope="module")
def whole(runs: Runs) -> Path:
    """A run of two generations of two steps, whose reference moves after each step."""
    run_dir = runs.folder / "whole"
    ended = runs.finish(run_dir, *EVERY_STEP, HALF)
    assert ended.exit_codes == [0] * NUM_RANKS, ended.output
    return run_dir


@pytest.mark.long
def test_reference_is_used_from_the_next_generation_on(whole: Path, undisturbed: Path) -> None:
    """The undisturbed run has a frozen reference."""
    ours, frozen = ([each["kl"] for each in read_metrics(run)] for run in (whole, undisturbed))
    assert ours[:2] == frozen[:2]
    assert 0 < ours[2] < frozen[2] / 2


@pytest.mark.slow
def test_reference_resumes_inside_and_between_generations(
    runs: Runs, whole: Path, tmp_path: Path
) -> None:
    """Resumed inside a generation, the reference is no longer the one that it began with."""
    for num_steps in (1, 2, 4):
        ended = runs.finish(tmp_path / "parts", *EVERY_STEP, HALF, f"train.num_steps={num_steps}")
        assert ended.exit_codes == [0] * NUM_RANKS, ended.output
    assert_same_run(tmp_path / "parts", whole)
    for rank in range(NUM_RANKS):
        ours, theirs = (
            (run / "checkpoints" / "step_4" / f"__{rank}_0.distcp").read_bytes()
            for run in (tmp_path / "parts", whole)
        )
        assert ours == theirs


@pytest.mark.slow
def test_reference_counts_a_skipped_step(runs: Runs, tmp_path: Path) -> None:
    """The next step moves the policy before the reference copies it."""
    overrides = ("train.num_steps=2", *MOVES, "grpo.ref_model_mixup_alpha=1.0")
    with runs.start(tmp_path / "run", *overrides, sabotage=SpoilGradient(3, steps=(1,))) as job:
        ended = job.end(120)
    assert ended.exit_codes == [0] * NUM_RANKS, ended.output
    assert "optimizer step skipped" in ended.output
    tensors = read_checkpoint(tmp_path / "run" / "checkpoints" / "step_2")
    reference = {k: v for k, v in tensors.items() if k.startswith(REFERENCE)}
    assert reference
    for key, values in reference.items():
        assert torch.equal(values, tensors[key.removeprefix(REFERENCE)])
