"""Prompts with images: transformers' numbers, at every layout, with the tower frozen or trained."""

import re
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from transformers import AutoModelForImageTextToText

from checkpoint_convert import read_shape
from checkpoint_convert.inspection import print_inspection
from checkpoint_convert.megatron_to_hf import export_checkpoint
from checkpoint_convert.text_tower import is_of_text, text_name
from checkpoint_convert.verify import verify_weights
from helpers.models.conversions import assert_same, weights_of
from helpers.models.images import (
    logits,
    sequence_with_images,
    tiny_vision_model,
    with_completion,
    with_other_pixels,
)
from helpers.models.towers import as_published
from helpers.oracle.grpo import in_float64
from helpers.oracle.optimizers import Parts, state_of, wholes
from helpers.oracle.policies import (
    EXACT,
    LOSS_WEIGHT,
    Numbers,
    OracleCase,
    accumulate,
    exact_numbers_of,
    layout_name,
    load_oracle,
    numbers_of,
    tiny_config,
    unstacked,
)
from helpers.ranks.processes import run_ranks
from megatron_grpo.checkpoints.checkpointer import Checkpoints
from megatron_grpo.checkpoints.trainer_state import TrainerState
from megatron_grpo.config.config import Config
from megatron_grpo.config.trained_shape import trained_shape
from megatron_grpo.policy.export import export_model
from megatron_grpo.policy.forward import compute_logprobs
from megatron_grpo.policy.model import Model, Policy, build_policy
from megatron_grpo.policy.optimizer import apply_gradient, gradient_norm
from megatron_grpo.policy.reference import reference_of
from megatron_grpo.policy.skipped_steps import name_nonfinite
from megatron_grpo.policy.vision import with_features
from parallel import ParallelDims
from parallel.alignment import Alignment
from parallel.cpu_device import setup_device
from parallel.groups import Groups, init_groups
from parallel.packing import PackedBatch, TokenSequence, pack

# Several images of different sizes in a prompt, its group, text beside them and alone, nothing.
MICROBATCHES = [[0, 1, 2, 3, 4], [5], [6], []]


def sequences(family: str) -> list[TokenSequence]:
    grids = [[(4, 6), (4, 4)], [(8, 4)], [], [(6, 6)], []]
    first, *others = (
        sequence_with_images(each, 5 + 3 * seed, seed, LOSS_WEIGHT, family)
        for seed, each in enumerate(grids)
    )
    return [first, with_completion(first, 9, seed=7), with_other_pixels(first), *others]


def oracle_logprobs(model: Any, sequence: TokenSequence) -> Tensor:
    tokens, first = sequence.tokens[None], sequence.num_prompt_tokens
    found = logits(model, tokens, sequence.images)[0, first - 1 : -1]
    return found.log_softmax(-1).gather(1, tokens[0, first:, None])[:, 0]


MIXTURE = "qwen3_vl_moe"
FAMILIES = ["qwen2_5_vl", "qwen3_vl", pytest.param(MIXTURE, marks=pytest.mark.slow)]
"""The mixture has the tower of qwen3_vl; where ranks share its experts it is no slow case."""


@pytest.fixture(scope="module", params=FAMILIES)
def case(request, tmp_path_factory) -> OracleCase:
    folder = tiny_vision_model(
        tmp_path_factory.mktemp(request.param) / request.param, request.param
    )
    model = load_oracle(folder, AutoModelForImageTextToText)
    with in_float64():
        logprobs = [oracle_logprobs(model, each) for each in sequences(folder.name)]
        (-LOSS_WEIGHT * torch.cat(logprobs).sum()).backward()
    found = {
        text_name(name): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    found = as_published(found, folder.name)
    towers = {name: each for name, each in found.items() if not is_of_text(name)}
    gradients = towers | unstacked(found, read_shape(folder))
    return OracleCase(folder, [each.detach() for each in logprobs], gradients)


def of_text(case: OracleCase) -> OracleCase:
    """The case with the vision tower frozen."""
    gradients = {name: each for name, each in case.gradients.items() if is_of_text(name)}
    return replace(case, gradients=gradients)


def start(
    rank: int, folder: Path, dims: ParallelDims, *overrides: str
) -> tuple[Config, Policy, Groups, list[PackedBatch]]:
    """A policy, and a rank's microbatches of a step."""
    setup_device(rank)
    cfg = tiny_config(folder, dims, "data.image_column=images", *overrides)
    groups = init_groups(dims, dynamic_context=cfg.parallel.dynamic_context_parallel)
    policy = build_policy(cfg, trained_shape(cfg), groups)
    alignment, shares = Alignment.for_mesh(dims, dims.tensor > 1), cfg.grpo.shared_prompts
    own = MICROBATCHES[groups.coordinates.data :: dims.data]
    every = sequences(folder.name)
    batches = [pack(every, each, alignment, share_prompts=shares) for each in own]
    return cfg, policy, groups, [*with_features(batches, policy.vision)]


def numbers_on_rank(rank: int, folder: Path, dims: ParallelDims, *overrides: str) -> Numbers:
    _, policy, groups, batches = start(rank, folder, dims, *overrides)
    return numbers_of(policy, groups, batches)


slow = pytest.mark.slow


def of_all(*layouts: Any, also: Sequence[Any] = ()) -> list[Any]:
    """(case, dims, overrides) of each family with all `layouts`, and those of `also`."""
    families = [each if hasattr(each, "marks") else pytest.param(each) for each in FAMILIES]
    values = [each if hasattr(each, "marks") else pytest.param(*each) for each in layouts]
    return [
        pytest.param(*family.values, *each.values, marks=[*family.marks, *each.marks])
        for family in families
        for each in values
    ] + [*also]


def id_of(value: Any) -> str:
    return layout_name(value) if isinstance(value, ParallelDims) else str(value)


SHARED = "grpo.shared_prompts=true"
DYNAMIC = "parallel.dynamic_context_parallel=true"


@pytest.mark.parametrize(
    ("case", "dims", "overrides"),
    of_all(
        (ParallelDims(), ()),
        (ParallelDims(tensor=2), (SHARED,)),
        (ParallelDims(context=2, pipeline=2), ()),
        pytest.param(ParallelDims(tensor=2), (), marks=slow),
        pytest.param(ParallelDims(), (SHARED,), marks=slow),
        pytest.param(ParallelDims(context=2), (DYNAMIC,), marks=slow),
        pytest.param(ParallelDims(tensor=2, context=2), (SHARED,), marks=slow),
        pytest.param(ParallelDims(data=2), (SHARED,), marks=slow),
        also=[
            pytest.param(MIXTURE, *each, marks=[pytest.mark.long, *marks])
            for *each, marks in [
                (ParallelDims(pipeline=2, data=2, expert=2), (), ()),
                (ParallelDims(tensor=2, expert_tensor=1, expert=2), (SHARED,), (slow,)),
            ]
        ],
    ),
    indirect=["case"],
    ids=id_of,
)
def test_logprobs_and_gradients_equal_transformers(case, dims, overrides):
    found = run_ranks(dims.world_size, numbers_on_rank, case.folder, dims, *overrides)
    of_text(case).check(found)


OVERLAPPED = [f"parallel.overlap_{x}=true" for x in ("grad_reduce", "param_gather")]
RECOMPUTED = [
    f"model.megatron.recompute_{x}" for x in ("granularity=full", "method=uniform", "num_layers=1")
]


@pytest.mark.parametrize(
    ("case", "dims", "overrides"),
    of_all(
        (ParallelDims(tensor=2), ()),
        pytest.param(ParallelDims(tensor=2), ("parallel.sequence_parallel=false",), marks=slow),
        # All layers to which features are added are in the first of two stages.
        pytest.param(
            ParallelDims(context=2, pipeline=2, num_layers_in_last_pipeline_stage=1),
            (SHARED,),
            marks=slow,
        ),
        pytest.param(ParallelDims(data=2), OVERLAPPED, marks=slow),
        pytest.param(ParallelDims(tensor=2, context=2), (*OVERLAPPED, *RECOMPUTED), marks=slow),
        pytest.param(ParallelDims(context=2), (DYNAMIC,), marks=slow),
        also=[
            # Of others the layers to which features are added would not be in the first chunk.
            pytest.param(
                "qwen2_5_vl", ParallelDims(pipeline=2, virtual_pipeline=2), (), marks=slow
            ),
        ],
    ),
    indirect=["case"],
    ids=id_of,
)
def test_so_do_those_of_a_tower_that_is_trained(case, dims, overrides):
    trained = "model.freeze_vision=false", *overrides
    case.check(run_ranks(dims.world_size, numbers_on_rank, case.folder, dims, *trained))


@slow
@pytest.mark.parametrize("case", ["qwen3_vl"], indirect=True)
@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_every_chunk_of_a_pipeline_adds_features_also_if_it_recomputes(case, granularity):
    dims = ParallelDims(pipeline=2, virtual_pipeline=2)
    recompute = [f"model.megatron.recompute_granularity={granularity}"]
    if granularity == "full":
        recompute += [f"model.megatron.recompute_{x}" for x in ("method=uniform", "num_layers=1")]
    of_text(case).check(run_ranks(2, numbers_on_rank, case.folder, dims, *recompute))


def exact_numbers_on_rank(rank: int, folder: Path, *overrides: str) -> Numbers:
    setup_device(rank)
    dims, every = ParallelDims(), sequences(folder.name)
    cfg = tiny_config(folder, dims, "data.image_column=images", *overrides)
    batches = [pack(every, each, Alignment(), dtype=torch.float64) for each in MICROBATCHES]
    return exact_numbers_of(cfg, init_groups(dims), batches)


@pytest.mark.parametrize("freeze", ["true", "false"])
def test_in_float64_they_are_exact(case, freeze):
    found = run_ranks(1, exact_numbers_on_rank, case.folder, f"model.freeze_vision={freeze}")
    trained = of_text(case) if freeze == "true" else case
    trained.check(found, EXACT)


TRAINED = ("model.freeze_vision=false", "optimizer.lr=1e-3", "optimizer.lr_warmup_steps=0")


def take_step(policy: Policy, groups: Groups, batches: list[PackedBatch]) -> None:
    accumulate(policy, groups, batches)
    apply_gradient(policy.optimizer, gradient_norm(policy.optimizer))
    policy.scheduler.step(increment=1)


def steps_on_rank(
    rank: int, folder: Path, dims: ParallelDims, num_steps: int, *overrides: str
) -> tuple[list[Parts], list[float]]:
    """The state after each step from the newest checkpoint on, and the log-probability before it;
    the second is saved and exported."""
    cfg, policy, groups, batches = start(rank, folder, dims, *TRAINED, *overrides)
    checkpoints, states, logprobs = Checkpoints(cfg, policy, None), [], []
    first = checkpoints.load().step
    states.append(state_of(policy))
    for step in range(first + 1, num_steps + 1):
        found = compute_logprobs(policy, batches, 1.0, groups)
        logprobs.append(float(sum(each.sum() for each, _ in found)))
        take_step(policy, groups, batches)
        states.append(state_of(policy))
        if step == 2:
            checkpoints.save(TrainerState(step=2), {})
            checkpoints.wait()
            export_model(cfg.train.run_dir / "hf", policy, cfg, groups)
    return states, logprobs


@pytest.mark.long
@pytest.mark.parametrize("case", ["qwen3_vl"], indirect=True)
@pytest.mark.parametrize(
    ("first", "own"),
    [
        (ParallelDims(data=2), OVERLAPPED),
        (ParallelDims(tensor=2), ["optimizer.optimizer=muon"]),
    ],
    ids=["overlapped", "muon"],
)
def test_checkpoints_and_exports_have_the_tower_as_it_is_trained(case, tmp_path, first, own):
    run, folder = tmp_path / "run", case.folder
    options = f"train.run_dir={run}", *own
    other = ParallelDims(pipeline=2, num_layers_in_last_pipeline_stage=1)
    ranks = run_ranks(2, steps_on_rank, folder, first, 3, *options)
    _, _, saved, third = wholes([states for states, _ in ranks])
    first_logprob, *_, last_logprob = ranks[0][1]
    assert first_logprob < last_logprob
    for dims in (first, other):
        resumed, again = wholes(
            [x for x, _ in run_ranks(2, steps_on_rank, folder, dims, 3, *options)]
        )
        for name, values in saved.items():
            assert torch.equal(resumed[name], values), name
        for name, values in third.items():
            if dims == first:
                assert torch.equal(again[name], values), name
            else:
                torch.testing.assert_close(again[name], values, rtol=1e-3, atol=1e-5)
    checkpoint = run / "checkpoints" / "step_2"
    assert verify_weights(checkpoint, run / "hf") == []
    told = StringIO()
    print_inspection(Console(file=told), checkpoint, folder, ParallelDims())
    num_tensors = sum(name.startswith("visual.") for name in case.gradients)
    assert re.search(rf"vision +{num_tensors} tensors", told.getvalue())
    export_checkpoint(checkpoint, tmp_path / "out", hf_config=folder)
    exported = weights_of(run / "hf")
    assert_same(weights_of(tmp_path / "out"), exported)
    assert not [n for n, each in weights_of(folder).items() if torch.equal(each, exported[n])]


def reference_on_rank(rank: int, folder: Path, dims: ParallelDims) -> list[Tensor]:
    """Log-probabilities of a policy before a step, and of the reference and the policy after it."""
    cfg, policy, groups, batches = start(rank, folder, dims, *TRAINED, "grpo.beta=0.1")
    reference = reference_of(policy, cfg, groups)

    def logprobs(model: Model) -> Tensor:
        return torch.cat([each for each, _ in compute_logprobs(model, batches, 1.0, groups)])

    before = logprobs(policy)
    take_step(policy, groups, batches)
    return [before, logprobs(reference), logprobs(policy)]


@pytest.mark.parametrize("case", ["qwen2_5_vl"], indirect=True)
def test_a_reference_sees_images_by_a_tower_of_its_own(case):
    for before, reference, after in run_ranks(1, reference_on_rank, case.folder, ParallelDims()):
        assert torch.equal(before, reference)
        assert not torch.allclose(before, after, atol=1e-3)


def fault_on_rank(rank: int, folder: Path, broken: str) -> str:
    _, policy, groups, batches = start(rank, folder, ParallelDims(), *TRAINED)
    accumulate(policy, groups, batches)
    for name, parameter in policy.parameters().items():
        if broken in name or "visual." in name:
            parameter.main_grad.fill_(torch.nan)
    return name_nonfinite(policy, [], torch.device("cpu"))


@pytest.mark.parametrize("case", ["qwen2_5_vl"], indirect=True)
@pytest.mark.parametrize("broken", ["word_embeddings", "visual."])
def test_a_tower_is_named_if_nothing_before_it_in_the_backward_is_broken(case, broken):
    (told,) = run_ranks(1, fault_on_rank, case.folder, broken)
    of_tower = broken == "visual."
    assert ("the gradient of visual." in told, "embed_tokens" in told) == (of_tower, not of_tower)
