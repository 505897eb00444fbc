"""The layer for multi-token prediction: it changes nothing for the policy, and it is saved.

Its loss and gradients are rows of test_model.py.
"""

import io
from contextlib import redirect_stderr
from functools import cache

import pytest
import torch
from safetensors.torch import load_file

from checkpoint_convert import read_shape
from checkpoint_convert.megatron_to_hf import export_checkpoint
from checkpoint_convert.verify import verify_weights
from helpers.models.conversions import assert_same, weights_of
from helpers.models.tiny import add_mtp_layer, tiny_model
from helpers.models.towers import tiny_multimodal
from helpers.oracle.mtp import ON
from helpers.oracle.optimizers import state_of, wholes
from helpers.oracle.policies import assert_equal_tensors, layout
from helpers.oracle.train_steps import BUDGETS, Case, batches_of, config
from helpers.ranks.processes import run_ranks
from megatron_grpo.algorithm.loss_function import LossFunction
from megatron_grpo.checkpoints.checkpointer import Checkpoints
from megatron_grpo.checkpoints.trainer_state import TrainerState
from megatron_grpo.config.trained_shape import trained_shape
from megatron_grpo.policy.export import export_model
from megatron_grpo.policy.model import build_policy
from megatron_grpo.policy.skipped_steps import SkippedSteps
from megatron_grpo.train_step import train_step
from parallel import ParallelDims
from parallel.cpu_device import setup_device
from parallel.groups import init_groups


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        family: add_mtp_layer(
            tiny_model(tmp_path_factory.mktemp(family), family, num_hidden_layers=4), norm=1.0
        )
        for family in ("deepseek_v3", "glm4_moe", "qwen3_next")
    }


def trained_on_rank(rank, dims, experience, configs):
    """Weights and metrics of a policy after some steps, by config."""
    setup_device(rank)
    groups = init_groups(dims, dynamic_context=configs[0].parallel.dynamic_context_parallel)
    found = {}
    for name, cfg in configs.items():
        policy = build_policy(cfg, trained_shape(cfg), groups)
        batches = batches_of(policy, experience, cfg, groups)
        steps = [
            train_step(
                policy, batches, cfg, groups, LossFunction.of(cfg.grpo), SkippedSteps(1), 0.05
            ).metrics
            for _ in range(3)
        ]
        found[name] = steps, {n: p.detach().clone() for n, p in policy.parameters().items()}
    return found


SETTINGS = ("optimizer.lr=1e-3", "optimizer.lr_warmup_steps=0", "optimizer.max_grad_norm=0.01")
OVERLAP = ("parallel.overlap_grad_reduce=true", "parallel.overlap_param_gather=true")
DYNAMIC, SHARED = "parallel.dynamic_context_parallel=true", "grpo.shared_prompts=true"


@pytest.fixture(scope="module")
def trained(folders):
    """Training without and with the layer, once for each model and layout."""

    @cache
    def trained(family, at, *overrides):
        folder, dims = folders[family], layout(at)
        given = (*SETTINGS, *overrides)
        configs = {
            number: config(folder, dims, {}, BUDGETS[0], *given, f"model.mtp_num_layers={number}")
            for number in (0, 1)
        }
        experience = Case(folder, {}, {23: 4, 1: 2, 2: 2, 40: 4}).experience()
        return run_ranks(dims.world_size, trained_on_rank, dims, experience, configs)

    return trained


@pytest.mark.parametrize(
    ("family", "at", "overrides"),
    [
        ("glm4_moe", "", ()),
        ("qwen3_next", "tp2 pp2", ()),
        ("glm4_moe", "pp2 dp2", OVERLAP),
        ("glm4_moe", "cp2", (DYNAMIC,)),
        ("glm4_moe", "cp2", (SHARED,)),
    ],
    ids=str,
)
def test_policy_is_trained_to_the_bit_as_without_mtp(trained, family, at, overrides):
    ranks = trained(family, at, *overrides)
    for rank in ranks:
        (without, expected), (steps, weights) = rank[0], rank[1]
        for name, values in expected.items():
            assert torch.equal(weights[name], values), name
        for step, metrics in zip(steps, without, strict=True):
            assert metrics == {n: v for n, v in step.items() if not n.startswith("mtp/")}
    names = {name for rank in ranks for name in rank[1][1].keys() - rank[0][1].keys()}
    assert {name.partition(".")[2].split(".")[0] for name in names} == {"mtp"}


def test_mtp_learns_the_same_however_the_work_is_shared(trained):
    ((steps, _),) = (rank[1] for rank in trained("glm4_moe", ""))
    losses = [step["mtp/loss"] for step in steps]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > losses[-1] + 0.01
    for at, overrides in (("pp2 dp2", OVERLAP), ("cp2", (DYNAMIC,)), ("cp2", (SHARED,))):
        for rank in trained("glm4_moe", at, *overrides):
            for step, expected in zip(rank[1][0], steps, strict=True):
                for name in ("mtp/loss", "mtp/grad_norm"):
                    assert step[name] == pytest.approx(expected[name], rel=1e-4)


RUN = (*ON, "optimizer.lr=1e-3", "optimizer.lr_warmup_steps=0")


def start(rank, folder, dims, run_dir):
    """(policy, config, groups, checkpoints) of a run."""
    setup_device(rank)
    groups = init_groups(dims)
    cfg = config(folder, dims, {}, BUDGETS[0], *RUN, f"train.run_dir={run_dir}")
    policy = build_policy(cfg, trained_shape(cfg), groups)
    return policy, cfg, groups, Checkpoints(cfg, policy, None)


def train_and_save(rank, folder, dims, case, run_dir):
    """The state after two steps, saved and exported, and after a third."""
    policy, cfg, groups, checkpoints = start(rank, folder, dims, run_dir)
    batches = batches_of(policy, case, cfg, groups)
    states = []
    for step in range(3):
        train_step(policy, batches, cfg, groups, LossFunction.of(cfg.grpo), SkippedSteps(1), 0.0)
        if step > 0:
            states.append(state_of(policy))
        if step == 1:
            checkpoints.save(TrainerState(step=2), {})
            checkpoints.wait()
            export_model(run_dir / "hf", policy, cfg, groups)
    return states


def resume(rank, folder, dims, case, run_dir):
    policy, cfg, groups, checkpoints = start(rank, folder, dims, run_dir)
    assert checkpoints.load().step == 2
    states = [state_of(policy)]
    train_step(
        policy,
        batches_of(policy, case, cfg, groups),
        cfg,
        groups,
        LossFunction.of(cfg.grpo),
        SkippedSteps(1),
        0.0,
    )
    return [*states, state_of(policy)]


def trained_and_exported(folder, tmp_path):
    """(saved state, checkpoint, source weights, exported weights) of a run."""
    run_dir = tmp_path / "run"
    case = Case(folder, {}).experience()
    first, other = layout("tp2 etp1 ep2"), layout("pp2")
    saved, trained = wholes(run_ranks(2, train_and_save, folder, first, case, run_dir))
    resumed, further = wholes(run_ranks(2, resume, folder, other, case, run_dir))
    assert_equal_tensors(resumed, saved)
    moved = [
        name for name in saved if "mtp." in name and not torch.equal(saved[name], trained[name])
    ]
    assert {"mtp.layers.0.eh_proj.weight", "optimizer.state.exp_avg.mtp.layers.0.enorm.weight"} <= {
        *moved
    }
    for name in moved:  # with the learning rate and the correction of the third step
        torch.testing.assert_close(further[name], trained[name], rtol=1e-3, atol=1e-6)
    checkpoint = run_dir / "checkpoints" / "step_2"
    export_checkpoint(checkpoint, tmp_path / "out", hf_config=folder)
    assert verify_weights(checkpoint, run_dir / "hf") == []
    exported, source = (load_file(at / "model.safetensors") for at in (run_dir / "hf", folder))
    assert_same(weights_of(tmp_path / "out"), exported)
    assert exported.keys() == source.keys()
    return saved, checkpoint, source, exported


def test_mtp_is_in_checkpoints_and_exports_as_it_is_trained(folders, tmp_path):
    folder = folders["deepseek_v3"]
    saved, checkpoint, source, exported = trained_and_exported(folder, tmp_path)
    export_checkpoint(checkpoint, tmp_path / "own")
    assert read_shape(tmp_path / "own").num_mtp_layers == 1
    own = weights_of(tmp_path / "own")
    assert_same(own, {name: exported[name] for name in own})
    layer = {name for name in source if name.startswith("model.layers.4.")}
    assert {name.removeprefix("model.layers.4.") for name in layer - own.keys()} == {
        "embed_tokens.weight",
        "shared_head.head.weight",
    }
    kept = {name for name in layer if torch.equal(exported[name], source[name])}
    assert {name.removeprefix("model.layers.4.") for name in kept} >= {
        "embed_tokens.weight",  # engines take the model's own
        "shared_head.head.weight",
        "mlp.gate.e_score_correction_bias",
    }
    assert not kept & {f"model.layers.4.{name}.weight" for name in ("eh_proj", "enorm", "hnorm")}
    torch.testing.assert_close(
        exported["model.layers.4.eh_proj.weight"], saved["mtp.layers.0.eh_proj.weight"]
    )


def test_mtp_of_a_multimodal_model_is_in_checkpoints_and_exports(tmp_path):
    folder = add_mtp_layer(tiny_multimodal(tmp_path / "model", "qwen3_5_moe"))
    saved, _, source, exported = trained_and_exported(folder, tmp_path)
    assert read_shape(tmp_path / "run" / "hf").can_train_mtp
    kept = {name for name in source if torch.equal(exported[name], source[name])}
    assert kept == {name for name in source if ".visual." in name}
    assert torch.equal(exported["mtp.fc.weight"], saved["mtp.layers.0.eh_proj.weight"])


def train_with_nan(rank, folder, case, run_dir):
    """Metrics of a step with NaN in the layer, the tensors that it moved, and its output."""
    policy, cfg, groups, _ = start(rank, folder, ParallelDims(), run_dir)
    with torch.no_grad():
        policy.mtp.module.module.eh_proj.weight[0, 0] = torch.nan
    before = {name: p.detach().nan_to_num() for name, p in policy.parameters().items()}
    batches = batches_of(policy, case, cfg, groups)
    with redirect_stderr(io.StringIO()) as output:
        metrics = train_step(
            policy, batches, cfg, groups, LossFunction.of(cfg.grpo), SkippedSteps(1), 0.0
        ).metrics
    after = {name: p.detach().nan_to_num() for name, p in policy.parameters().items()}
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    return metrics, moved, output.getvalue()


def test_mtp_step_that_is_not_finite_is_skipped_alone(folders, tmp_path):
    case = Case(folders["glm4_moe"], {}).experience()
    folder, run_dir = folders["glm4_moe"], tmp_path / "run"
    ((metrics, moved, output),) = run_ranks(1, train_with_nan, folder, case, run_dir)
    line = "mtp: optimizer step skipped: its loss is nan, the norm of its gradient nan\n"
    assert line in output  # torch may warn, too
    assert (metrics["mtp/skipped_steps"], metrics["skipped_steps"]) == (1, 0)
    assert not {"mtp/loss", "mtp/grad_norm"} & metrics.keys()
    assert moved
    assert not [name for name in moved if "mtp." in name]
