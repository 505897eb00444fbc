"""Mixtures of experts on ranks, compared with `transformers` in float64."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from megatron_grpo.policy.forward import compute_logprobs
from megatron_grpo.policy.model import Policy
from megatron_grpo.policy.optimizer import gradient_norm
from parallel import Box, ParallelDims
from parallel.groups import Groups
from parallel.packing import PackedBatch
from policies import accumulate, gradient_boxes

Numbers = tuple[dict[int, Tensor], list[tuple[str, Box, Tensor]], float]


def layout_name(dims: ParallelDims) -> str:
    virtual = f" vpp({dims.virtual_pipeline})" if dims.virtual_pipeline > 1 else ""
    return f"{dims}{virtual} ep({dims.expert}) etp({dims.expert_tensor})"


def load_oracle(folder: Path) -> AutoModelForCausalLM:
    # Its other ways to compute experts know no float64.
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager"
    )


def gradients_of(model: AutoModelForCausalLM, loss: Tensor) -> dict[str, Tensor]:
    """Gradients by the names of the weight files, with one for each matrix of each expert."""
    loss.backward()
    return revert_weight_conversion(model, {n: p.grad for n, p in model.named_parameters()})


def numbers_of(policy: Policy, groups: Groups, batches: Sequence[PackedBatch]) -> Numbers:
    """Log-probabilities by sequence, boxes of the gradient, and its norm."""
    logprobs = {
        int(index): values[batch.loss_mask & (batch.sequence_index == index)]
        for batch, (values, _) in zip(
            batches, compute_logprobs(policy, batches, 1.0, groups) or [], strict=False
        )
        for index in batch.sequence_index[batch.loss_mask].unique()
    }
    accumulate(policy, groups, list(batches))
    return logprobs, gradient_boxes(policy), gradient_norm(policy.optimizer)


def check_logprobs(ranks: Sequence[Numbers], expected: Sequence[Tensor]) -> None:
    seen = [item for logprobs, _, _ in ranks for item in logprobs.items()]
    assert {index for index, _ in seen} == set(range(len(expected)))
    for index, values in seen:
        torch.testing.assert_close(values.double(), expected[index], atol=1e-5, rtol=0)


def check_gradients(ranks: Sequence[Numbers], expected: dict[str, Tensor], norm: float) -> None:
    actual = {name: torch.full_like(g, torch.nan) for name, g in expected.items()}
    for _, boxes, rank_norm in ranks:
        assert rank_norm == pytest.approx(norm, rel=1e-5)
        for name, box, values in boxes:
            actual[name][box.slices] = values.double()
    for name, gradient in expected.items():
        error = (actual[name] - gradient).norm() / gradient.norm()
        assert error < 1e-5, f"{name}: {error:.1e}"
