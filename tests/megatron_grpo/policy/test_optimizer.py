import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from checkpoint_convert import read_shape
from helpers.models.tiny import tiny_model
from helpers.oracle.policies import (
    LENGTHS,
    LOSS_WEIGHT,
    Boxes,
    accumulate,
    boxes_of,
    own_share,
    pack_all,
    sequence_logprobs,
    start_policy,
    tiny_config,
    whole,
)
from helpers.ranks.processes import run_ranks
from megatron_grpo.config.optimizer import OptimizerConfig
from megatron_grpo.policy.chunks import describe
from megatron_grpo.policy.model import build_policy, unwrapped
from megatron_grpo.policy.optimizer import apply_gradient, gradient_norm, make_scheduler
from megatron_grpo.policy.optimizer_state import make_loadable, set_steps_taken, steps_taken
from parallel import ParallelDims

NUM_STEPS = 3
LR, BETA1, BETA2, WEIGHT_DECAY, MAX_GRAD_NORM = 1e-3, 0.8, 0.9, 0.1, 1.0
EPSILON = 1e-3
"""As large as a clipped gradient's elements: else Adam's steps do not depend on its scale."""
ADAMW = [
    f"optimizer.lr={LR}",
    f"optimizer.adam_beta1={BETA1}",
    f"optimizer.adam_beta2={BETA2}",
    f"optimizer.adam_eps={EPSILON}",
    f"optimizer.weight_decay={WEIGHT_DECAY}",
    f"optimizer.max_grad_norm={MAX_GRAD_NORM}",
    "optimizer.lr_decay_style=linear",
    f"train.num_steps={2 * NUM_STEPS}",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3", tied=True, num_hidden_layers=5)


def trained_weights(rank: int, folder: Path, dims: ParallelDims) -> tuple[list[float], Boxes]:
    """Gradient norms of the steps, and this rank's part of the weights after them."""
    policy, groups = start_policy(rank, folder, dims, *ADAMW)
    described = describe(unwrapped(policy.chunks[0]), policy.optimizer)
    assert described.endswith("attention: PackedAttention, optimizer: AdamW of torch")
    share, norms = own_share(pack_all(LENGTHS, dims), groups), []
    for _ in range(NUM_STEPS):
        accumulate(policy, groups, share)
        norms.append(gradient_norm(policy.optimizer))
        apply_gradient(policy.optimizer, norms[-1])
        policy.scheduler.step(increment=1)
    return norms, boxes_of(policy, policy.parameters())


def weights_by_torch(folder: Path) -> tuple[list[float], dict[str, Tensor]]:
    """Norms and weights of the same steps by transformers and torch's AdamW, in one process."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weights = dict(model.named_parameters())
    matrices = [p for p in weights.values() if p.dim() > 1]
    norm_weights = [p for p in weights.values() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": WEIGHT_DECAY},
            {"params": norm_weights, "weight_decay": 0.0},
        ],
        betas=(BETA1, BETA2),
        eps=EPSILON,
    )
    norms = []
    for step in range(NUM_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = LR * (1 - step / (2 * NUM_STEPS))
        optimizer.zero_grad()
        (-LOSS_WEIGHT * torch.cat(sequence_logprobs(model, LENGTHS)).sum()).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)))
        optimizer.step()
    return norms, {name: parameter.detach() for name, parameter in weights.items()}


@pytest.mark.long
@pytest.mark.parametrize(
    "dims",
    [ParallelDims(tensor=2, virtual_pipeline=2, pipeline=2), ParallelDims(pipeline=2, data=2)],
    ids=str,
)
def test_apply_gradient_equals_torch_adamw_on_transformers(folder, dims):
    want_norms, want = weights_by_torch(folder)
    before = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    ranks = run_ranks(dims.world_size, trained_weights, folder, dims)
    assert [norms for norms, _ in ranks] == [pytest.approx(want_norms, rel=1e-4)] * len(ranks)
    found = whole([boxes for _, boxes in ranks])
    assert found.keys() == want.keys()
    for name, values in found.items():
        change, want_change = values - before[name], want[name] - before[name]
        error = float((change - want_change).abs().max())
        assert error < 0.01 * LR, f"{name}: {error:.1e}"


def first_step(rank: int, folder: Path, dims: ParallelDims, limit: float) -> float:
    """The first gradient's norm; asserts that all optimizers' moments are its clipped elements."""
    limited = f"optimizer.max_grad_norm={limit}"
    policy, groups = start_policy(rank, folder, dims, *ADAMW, limited)
    accumulate(policy, groups, own_share(pack_all(LENGTHS, dims), groups))
    norm = gradient_norm(policy.optimizer)
    parts = policy.optimizer.chained_optimizers
    gradients = [[p.grad.clone() for p in part.get_parameters()] for part in parts]
    assert len(parts) == 2 and all(gradients)
    apply_gradient(policy.optimizer, norm)
    share = (1 - BETA1) * min(1, limit / norm)
    for part, of_part in zip(parts, gradients, strict=True):
        for parameter, gradient in zip(part.get_parameters(), of_part, strict=True):
            moment = part.optimizer.state[parameter]["exp_avg"]
            torch.testing.assert_close(moment, share * gradient, rtol=1e-4, atol=1e-9)
    return norm


def test_apply_gradient_clips_experts_and_the_rest_by_one_norm(tmp_path):
    mixture, dims = tiny_model(tmp_path, "qwen3_moe"), ParallelDims(data=2, expert=2)
    norms = run_ranks(dims.world_size, first_step, mixture, dims, MAX_GRAD_NORM)
    assert min(norms) > 2 * MAX_GRAD_NORM
    assert run_ranks(dims.world_size, first_step, mixture, dims, 2 * max(norms)) == norms


def learning_rates(rank: int, folder: Path, schedules: list[list[str]]) -> list[list[float]]:
    """Learning rates of the steps of a run with each of the `schedules`."""
    _, groups = start_policy(rank, folder, ParallelDims())
    rates = []
    for schedule in schedules:
        cfg = tiny_config(folder, ParallelDims(), *schedule)
        policy = build_policy(cfg, read_shape(folder), groups)
        rates.append([])
        for _ in range(cfg.train.num_steps):
            [rate] = {group["lr"] for group in policy.optimizer.param_groups}
            rates[-1].append(rate)
            policy.scheduler.step(increment=1)
    return rates


def test_scheduler_warms_up_from_zero_and_decays_beyond_the_last_step(folder):
    expected = {
        ("constant", 0): [1, 1, 1, 1, 1, 1],
        ("constant", 2): [0, 0.5, 1, 1, 1, 1],
        ("linear", 2): [0, 0.5, 1, 0.8, 0.6, 0.4],
        ("cosine", 2): [0, 0.5, 1, 0.6 + 0.4 * 0.5**0.5, 0.6, 0.6 - 0.4 * 0.5**0.5],
    }
    schedules = [
        [
            "optimizer.lr=1.0",
            f"optimizer.min_lr={0 if style == 'constant' else 0.2}",
            f"optimizer.lr_decay_style={style}",
            f"optimizer.lr_warmup_steps={warm_up}",
            "train.num_steps=6",
        ]
        for style, warm_up in expected
    ]
    [found] = run_ranks(1, learning_rates, folder, schedules)
    for rates, (name, wanted) in zip(found, expected.items(), strict=True):
        assert rates == pytest.approx(wanted), name


@pytest.mark.parametrize(
    ("style", "decay"),
    {
        "exponential": lambda done: 2 * 0.5**done - 1,
        "linear": lambda done: 1 - done,
        "cosine": lambda done: 0.5 * (math.cos(math.pi * done) + 1),
        "minus_sqrt": lambda done: 1 - done**0.5,
    }.items(),
)
@pytest.mark.parametrize("resumed_at", [0, 3])
def test_make_scheduler_of_wsd_stays_at_its_peak_until_the_last_steps(style, decay, resumed_at):
    cfg = OptimizerConfig(
        lr=1.0,
        min_lr=0.2,
        lr_warmup_steps=2,
        lr_decay_style="WSD",
        lr_wsd_decay_style=style,
        lr_wsd_decay_steps=3,
    )
    optimizer = SimpleNamespace(param_groups=[{}])
    shorter = make_scheduler(optimizer, cfg, 5)
    shorter.step(resumed_at)
    scheduler = make_scheduler(optimizer, cfg, 7)  # goes on for longer
    scheduler.load_state_dict(shorter.state_dict())
    rates = []
    for _ in range(resumed_at, 7):
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step(1)
    expected = [0, 0.5, 1, 1, 1, 0.2 + 0.8 * decay(1 / 3), 0.2 + 0.8 * decay(2 / 3)]
    assert rates == pytest.approx(expected[resumed_at:])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.2)


class FusedAdam(torch.optim.SGD):
    """Counts steps in its groups, as Transformer Engine's does."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError("Transformer Engine's allocates all moments a second time")


@pytest.mark.parametrize("adam", [torch.optim.AdamW, FusedAdam])
def test_set_steps_taken_restores_into_the_state_that_is_there(adam):
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    inner = adam([{"params": [weight]} for weight in weights], lr=0.1)
    if adam is torch.optim.AdamW:
        make_loadable(inner)
    before = [value for state in inner.state.values() for value in state.values()]
    optimizer = SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=inner)])
    assert steps_taken(optimizer) == 0
    set_steps_taken(optimizer, 7)
    assert steps_taken(optimizer) == 7
    after = [value for state in inner.state.values() for value in state.values()]
    assert all(value is same for value, same in zip(before, after, strict=True))
    if adam is torch.optim.AdamW:
        weights[0].grad, weights[1].grad = torch.ones(2), torch.ones(2)
        inner.step()
        assert [int(state["step"]) for state in inner.state.values()] == [8, 8]
