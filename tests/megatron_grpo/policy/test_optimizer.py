from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from distributed import run_ranks
from models import tiny_model
from parallel import Box, ParallelDims
from policies import (
    LENGTHS,
    LOSS_WEIGHT,
    accumulate,
    pack_all,
    sequence_logprobs,
    start_policy,
)

NUM_STEPS = 3
LR, BETA1, WEIGHT_DECAY, MAX_GRAD_NORM = 1e-3, 0.8, 0.1, 1.0
ADAMW = [
    f"optimizer.lr={LR}",
    f"optimizer.adam_beta1={BETA1}",
    f"optimizer.weight_decay={WEIGHT_DECAY}",
    f"optimizer.max_grad_norm={MAX_GRAD_NORM}",
    "optimizer.lr_decay_style=linear",
    f"train.num_steps={2 * NUM_STEPS}",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3", tied=True, num_hidden_layers=5)


def trained_weights(
    rank: int, folder: Path, dims: ParallelDims
) -> tuple[list[float], list[tuple[str, Box, Tensor]]]:
    """Gradient norms of the steps, and what this rank owns of the weights after them."""
    policy, groups = start_policy(rank, folder, dims, *ADAMW)
    share = pack_all(LENGTHS, dims)[groups.coordinates.data :: dims.data]
    norms = []
    for _ in range(NUM_STEPS):
        accumulate(policy, groups, share)
        norms.append(policy.optimizer.step()[1])
        policy.scheduler.step(increment=1)
    parameters = policy.parameters()
    return norms, [
        (piece.tensor, piece.box, parameters[piece.local][piece.local_box.slices].detach().clone())
        for piece in policy.layout.pieces
        if not piece.is_replica
    ]


def weights_by_torch(folder: Path) -> tuple[list[float], dict[str, Tensor]]:
    """The same steps with transformers and torch's own AdamW, in one process."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weights = dict(model.named_parameters())
    matrices = [p for p in weights.values() if p.dim() > 1]
    norm_weights = [p for p in weights.values() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": WEIGHT_DECAY},
            {"params": norm_weights, "weight_decay": 0.0},
        ],
        betas=(BETA1, 0.95),
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


@pytest.mark.parametrize(
    "dims",
    [
        ParallelDims(),
        ParallelDims(tensor=2, pipeline=2),
        ParallelDims(pipeline=2, data=2),
        ParallelDims(pipeline=2, virtual_pipeline=2),
    ],
    ids=lambda d: f"{d} vpp({d.virtual_pipeline})",
)
def test_steps_equal_torch_adamw_on_transformers(folder, dims):
    want_norms, want = weights_by_torch(folder)
    before = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    seen = set()
    for norms, pieces in run_ranks(dims.world_size, trained_weights, folder, dims):
        assert norms == pytest.approx(want_norms, rel=1e-4)
        for name, box, values in pieces:
            seen.add(name)
            change = values - before[name][box.slices]
            want_change = want[name][box.slices] - before[name][box.slices]
            # Adam's first steps are the signs of gradients: near zero they may be either.
            wrong = (change - want_change).abs() > 0.1 * LR
            assert wrong.float().mean() < 0.01, f"{name}: {wrong.sum()} of {wrong.numel()}"
    assert seen == set(want)


def wrongly_saved_master_weights(rank: int, folder: Path, dims: ParallelDims) -> list[str]:
    """Names of parameters whose master weights would be saved as something else."""
    policy, groups = start_policy(rank, folder, dims)
    accumulate(policy, groups, pack_all(LENGTHS, dims))
    policy.optimizer.step()
    metadata = {"distrib_optim_sharding_type": "fully_reshardable"}
    models = {
        f"model{i}": chunk.sharded_state_dict(metadata=metadata)
        for i, chunk in enumerate(policy.chunks)
    }
    saved = policy.optimizer.sharded_state_dict(models, metadata=metadata)
    masters = [tensors["param"] for tensors in saved["param_state"].values()]
    assert len(masters) == len(policy.parameters())
    weights = [tensor for model in models.values() for tensor in model.values()]
    prefix = "optimizer.state.param."
    return [
        master.key
        for master in masters
        if not any(
            master.key == prefix + weight.key and torch.equal(master.data, weight.data)
            for weight in weights  # all layers go by one key
        )
    ]


def test_the_optimizer_is_saved_with_the_weights_it_has(folder):
    # Megatron's own bookkeeping goes wrong here: a tied embedding on two stages has a gradient
    # bucket of its own, and at TP2 it ends in padding.
    dims = ParallelDims(tensor=2, pipeline=2)
    results = run_ranks(dims.world_size, wrongly_saved_master_weights, folder, dims)
    assert results == [[]] * dims.world_size
