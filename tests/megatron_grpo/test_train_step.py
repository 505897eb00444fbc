"""The gradient of one optimizer step does not depend on how the work was laid out.

Loss and every parameter's gradient are compared, over layouts, microbatch budgets and loss types,
with a padded, single-process computation in float64 on the `transformers` model.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from checkpoint_convert import read_shape
from distributed import run_ranks
from megatron_grpo.config import Config
from megatron_grpo.experience import Experience, share_out
from megatron_grpo.model import build_policy
from megatron_grpo.prompts import Prompt
from megatron_grpo.rollout.samples import Sample
from megatron_grpo.train_step import accumulate_gradient
from models import tiny_model
from oracle import OracleLoss, oracle_logprobs, oracle_model_loss
from parallel import ParallelDims
from parallel.device import setup_device
from parallel.groups import init_groups
from parallel.microbatches import CostModel
from policies import gradient_boxes, tiny_config

NUM_SEQUENCES, MAX_COMPLETION_LENGTH = 12, 24
TEMPERATURE, BETA, EPSILON, EPSILON_HIGH, DELTA = 0.8, 0.05, 0.2, 0.3, 1.5
LOSS_TYPES = ("grpo", "dapo", "dr_grpo")
BUDGETS = (64, 4096)  # tokens per microbatch: many small ones, and all in one
LAYOUTS = [
    ParallelDims(),
    ParallelDims(tensor=2),
    ParallelDims(pipeline=2),
    ParallelDims(pipeline=2, virtual_pipeline=2),
    ParallelDims(context=2),
    ParallelDims(data=2),
    ParallelDims(pipeline=3),
    ParallelDims(tensor=2, context=2),
    ParallelDims(pipeline=2, data=2),
    ParallelDims(tensor=2, context=2, pipeline=2),
]

Gradients = dict[str, torch.Tensor]


@pytest.fixture(scope="module", params=["llama tied", "qwen3 untied"])
def case(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator["Case"]:
    family, tied = request.param.split()
    folder = tmp_path_factory.mktemp(family)
    yield Case(tiny_model(folder, family, tied=tied == "tied", num_hidden_layers=4))


class Case:
    """A model, a batch of completions of unequal lengths, and the oracle's answers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        generator = torch.Generator().manual_seed(1)

        def draw(low: int, high: int, size: int) -> list[int]:
            return torch.randint(low, high, (size,), generator=generator).tolist()

        self.prompts = [draw(4, 250, n) for n in draw(1, 20, NUM_SEQUENCES)]
        self.completions = [
            draw(4, 250, n) for n in draw(1, MAX_COMPLETION_LENGTH + 1, NUM_SEQUENCES)
        ]
        self.advantages = torch.randn(NUM_SEQUENCES, generator=generator).tolist()
        with torch.no_grad():
            exact = oracle_logprobs(model, self.prompts, self.completions, TEMPERATURE)
        # Off by enough for the clips on both sides, and the dual clip, to bind on some tokens.
        self.old_logprobs = [
            (lp + 0.4 * torch.randn(lp.shape, generator=generator)).float().double() for lp in exact
        ]
        self.answers = {loss_type: self.answer(model, loss_type) for loss_type in LOSS_TYPES}

    def answer(self, model: Any, loss_type: str) -> tuple[float, Gradients]:
        return oracle_model_loss(
            model,
            self.prompts,
            self.completions,
            self.advantages,
            OracleLoss(
                loss_type=loss_type,
                max_completion_length=MAX_COMPLETION_LENGTH,
                epsilon=EPSILON,
                epsilon_high=EPSILON_HIGH,
                delta=DELTA,
                beta=BETA,
                temperature=TEMPERATURE,
            ),
            old_logprobs=self.old_logprobs,
            ref_logprobs=[_reference(lp) for lp in self.old_logprobs],
        )

    def experience(self) -> Experience:
        samples = [
            Sample(
                prompt=Prompt(index=i, token_ids=tuple(prompt), text="", row={}),
                sample_index=0,
                completion_ids=tuple(completion),
                logprobs=tuple(old.tolist()),
                finish_reason="stop",
                text="",
                policy_version=0,
            )
            for i, (prompt, completion, old) in enumerate(
                zip(self.prompts, self.completions, self.old_logprobs, strict=True)
            )
        ]
        nothing = torch.zeros(NUM_SEQUENCES)
        return Experience(samples, [], nothing, nothing, torch.tensor(self.advantages))


def _reference(old_logprobs: torch.Tensor) -> torch.Tensor:
    """A reference policy's log-probabilities, near the old ones."""
    return 0.95 * old_logprobs


def _config(folder: Path, dims: ParallelDims, loss_type: str, budget: int) -> Config:
    return tiny_config(
        folder,
        dims,
        f"train.max_tokens_per_microbatch={budget}",
        f"grpo.generation_batch_size={NUM_SEQUENCES}",
        "grpo.num_generations=2",
        f"grpo.loss_type={loss_type}",
        f"grpo.beta={BETA}",
        f"grpo.epsilon={EPSILON}",
        f"grpo.epsilon_high={EPSILON_HIGH}",
        f"grpo.delta={DELTA}",
        f"rollout.temperature={TEMPERATURE}",
        f"rollout.max_completion_length={MAX_COMPLETION_LENGTH}",
    )


def gradients_on_rank(
    rank: int, dims: ParallelDims, folder: Path, experience: Experience
) -> dict[tuple[str, int], tuple[float, list[Any]]]:
    """For each loss type and budget: the loss, and this rank's boxes of the whole gradient."""
    setup_device(rank)
    groups = init_groups(dims)
    policy = build_policy(_config(folder, dims, "grpo", 4096), read_shape(folder), groups)
    results = {}
    for loss_type in LOSS_TYPES:
        for budget in BUDGETS:
            cfg = _config(folder, dims, loss_type, budget)
            share = share_out(experience, 0, CostModel.transformer(64), cfg)[
                groups.coordinates.data
            ]
            batches = [
                replace(
                    batch,
                    old_logprobs=batch.rollout_logprobs,
                    ref_logprobs=_reference(batch.rollout_logprobs),
                )
                for batch in share[0]
            ]
            metrics = accumulate_gradient(policy, batches, cfg, groups)
            sums = metrics.sums.sum(dim=0)
            dist.all_reduce(sums, group=groups.data_context)
            dist.all_reduce(sums, group=groups.pipeline)
            results[loss_type, budget] = (float(sums[1]), gradient_boxes(policy))
    return results


def _cut(tensor: torch.Tensor, box: Any) -> torch.Tensor:
    return tensor[tuple(slice(s, s + n) for s, n in zip(box.start, box.size, strict=True))]


@pytest.mark.parametrize("dims", LAYOUTS, ids=lambda d: f"{d} vpp({d.virtual_pipeline})")
def test_loss_and_every_gradient_equal_the_float64_oracle(case: Case, dims: ParallelDims) -> None:
    ranks = run_ranks(
        dims.world_size, gradients_on_rank, dims, case.folder, case.experience(), timeout=240
    )
    for loss_type in LOSS_TYPES:
        expected_loss, expected = case.answers[loss_type]
        for budget in BUDGETS:
            for result in ranks:
                assert result[loss_type, budget][0] == pytest.approx(expected_loss, rel=1e-5)
            boxes = [box for result in ranks for box in result[loss_type, budget][1]]
            actual = {name: torch.full_like(g, torch.nan) for name, g in expected.items()}
            for name, box, values in boxes:
                _cut(actual[name], box).copy_(values)
            for name, gradient in expected.items():
                error = (actual[name] - gradient).norm() / gradient.norm()
                assert error < 1e-5, f"{name}: {error:.1e} for {loss_type}, budget {budget}"
