"""Vision towers: trained, saved and exported with their policy; a reference has its own.

Log-probabilities and gradients of prompts with images are rows of test_model.py.
"""

import re
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor

from checkpoint_convert.inspection import print_inspection
from checkpoint_convert.megatron_to_hf import export_checkpoint
from checkpoint_convert.verify import verify_weights
from helpers.models.conversions import assert_same, weights_of
from helpers.models.images import tiny_vision_model
from helpers.oracle.images import Images
from helpers.oracle.optimizers import Parts, state_of, wholes
from helpers.oracle.policies import (
    accumulate,
    assert_equal_tensors,
    layout,
    take_step,
    tiny_config,
)
from helpers.oracle.rows import OVERLAP
from helpers.ranks.processes import run_ranks
from megatron_grpo.checkpoints.checkpointer import Checkpoints
from megatron_grpo.checkpoints.trainer_state import TrainerState
from megatron_grpo.config.config import Config
from megatron_grpo.config.trained_shape import trained_shape
from megatron_grpo.policy.export import export_model
from megatron_grpo.policy.forward import compute_logprobs
from megatron_grpo.policy.model import Model, Policy, build_policy
from megatron_grpo.policy.reference import reference_of
from megatron_grpo.policy.skipped_steps import name_nonfinite
from megatron_grpo.policy.vision import with_features
from parallel import ParallelDims
from parallel.cpu_device import setup_device
from parallel.groups import Groups, init_groups
from parallel.packing import PackedBatch

TRAINED = ("model.freeze_vision=false", "optimizer.lr=1e-3", "optimizer.lr_warmup_steps=0")


@pytest.fixture(scope="module")
def qwen2_5_vl(tmp_path_factory) -> Path:
    return tiny_vision_model(tmp_path_factory.mktemp("model"), "qwen2_5_vl")


def start(
    rank: int, folder: Path, dims: ParallelDims, *overrides: str
) -> tuple[Config, Policy, Groups, list[PackedBatch]]:
    """A policy whose tower is trained, and a rank's microbatches of a step."""
    setup_device(rank)
    cfg = tiny_config(folder, dims, *Images.overrides, *TRAINED, *overrides)
    groups = init_groups(dims)
    policy = build_policy(cfg, trained_shape(cfg), groups)
    return cfg, policy, groups, [*with_features(Images().pack(cfg, groups), policy.vision)]


def steps_on_rank(
    rank: int, folder: Path, dims: ParallelDims, num_steps: int, *overrides: str
) -> tuple[list[Parts], list[float]]:
    """States after each step since the newest checkpoint, and log-probabilities before each; saves
    and exports after the second."""
    cfg, policy, groups, batches = start(rank, folder, dims, *overrides)
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
@pytest.mark.parametrize(
    ("at", "own"),
    [("dp2", OVERLAP), ("tp2", ["optimizer.optimizer=muon"])],
    ids=["overlapped", "muon"],
)
def test_tower_is_in_checkpoints_and_exports_as_it_is_trained(tmp_path, at, own):
    run, folder = tmp_path / "run", tiny_vision_model(tmp_path / "model", "qwen3_vl")
    options = f"train.run_dir={run}", *own
    first, other = layout(at), layout("pp2 last1")
    ranks = run_ranks(2, steps_on_rank, folder, first, 3, *options)
    _, _, saved, third = wholes([states for states, _ in ranks])
    first_logprob, *_, last_logprob = ranks[0][1]
    assert first_logprob < last_logprob
    for dims in (first, other):
        resumed, again = wholes(
            [x for x, _ in run_ranks(2, steps_on_rank, folder, dims, 3, *options)]
        )
        assert_equal_tensors(resumed, saved)
        if dims == first:
            assert_equal_tensors(again, third)
        for name, values in third.items():
            torch.testing.assert_close(again[name], values, rtol=1e-3, atol=1e-5)
    checkpoint = run / "checkpoints" / "step_2"
    assert verify_weights(checkpoint, run / "hf") == []
    output = StringIO()
    print_inspection(Console(file=output), checkpoint, folder, ParallelDims())
    num_tensors = sum(".visual." in name for name in weights_of(folder))
    assert re.search(rf"vision +{num_tensors} tensors", output.getvalue())
    export_checkpoint(checkpoint, tmp_path / "out", hf_config=folder)
    exported = weights_of(run / "hf")
    assert_same(weights_of(tmp_path / "out"), exported)
    assert not [n for n, each in weights_of(folder).items() if torch.equal(each, exported[n])]


def reference_on_rank(rank: int, folder: Path, dims: ParallelDims) -> list[Tensor]:
    """Log-probabilities of a policy before a step, and of the reference and the policy after it."""
    cfg, policy, groups, batches = start(rank, folder, dims, "grpo.beta=0.1")
    reference = reference_of(policy, cfg, groups)

    def logprobs(model: Model) -> Tensor:
        return torch.cat([each for each, _ in compute_logprobs(model, batches, 1.0, groups)])

    before = logprobs(policy)
    take_step(policy, groups, batches)
    return [before, logprobs(reference), logprobs(policy)]


def test_reference_sees_images_by_a_tower_of_its_own(qwen2_5_vl):
    for before, reference, after in run_ranks(1, reference_on_rank, qwen2_5_vl, ParallelDims()):
        assert torch.equal(before, reference)
        assert not torch.allclose(before, after, atol=1e-3)


def fault_on_rank(rank: int, folder: Path, broken: str) -> str:
    _, policy, groups, batches = start(rank, folder, ParallelDims())
    accumulate(policy, groups, batches)
    for name, parameter in policy.parameters().items():
        if broken in name or "visual." in name:
            parameter.main_grad.fill_(torch.nan)
    return name_nonfinite(policy, [], torch.device("cpu"))


@pytest.mark.parametrize("broken", ["word_embeddings", "visual."])
def test_name_nonfinite_names_the_first_of_tower_and_embedding(qwen2_5_vl, broken):
    (text,) = run_ranks(1, fault_on_rank, qwen2_5_vl, broken)
    of_tower = broken == "visual."
    assert ("the gradient of visual." in text, "embed_tokens" in text) == (of_tower, not of_tower)
