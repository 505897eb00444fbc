"""Computing the prompt of a group only once does not change loss and gradient.

Over layouts, microbatch budgets and recipes, against a padded, single-process computation in
float64 on the `transformers` model, which repeats every prompt.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from checkpoint_convert import read_shape
from distributed import run_ranks
from megatron_grpo.batch.distribute import split_for_data_parallel
from megatron_grpo.batch.experience import Experience
from megatron_grpo.batch.prepare import add_logprobs
from megatron_grpo.config.config import Config
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.samples import Sample
from megatron_grpo.policy.model import build_policy
from megatron_grpo.train_step import accumulate_gradient
from models import tiny_model
from oracle import OracleLoss, oracle_logprobs, oracle_model_loss
from parallel import ParallelDims
from parallel.alignment import Alignment
from parallel.cpu_device import setup_device
from parallel.groups import init_groups
from parallel.microbatches import CostModel
from policies import gradient_boxes, tiny_config

PROMPTS = [23, 1, 2, 40]
"""Tokens of each; the first token is all of one, and another saves nothing once aligned."""
NUM_GENERATIONS, MAX_COMPLETION_LENGTH = 4, 24
NUM_SEQUENCES = NUM_GENERATIONS * len(PROMPTS)
EMPTY = 2  # a completion without a token
TEMPERATURE, BETA = 0.8, 0.05
BUDGETS = (96, 4096)  # groups that are cut, and all in one microbatch
RECIPES: dict[str, dict[str, Any]] = {
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.3, "delta": 1.5},
    "gspo, forking tokens": {
        "loss_type": "grpo",
        "epsilon": 0.03,
        "epsilon_high": 0.04,
        "importance_sampling_level": "sequence",
        "use_bias_correction_kl": True,
        # The first tokens of a prompt's completions have equal entropies: no threshold is there.
        "top_entropy_quantile": 0.45,
        "entropy_coef": 0.3,
    },
}
DENSE = [
    ParallelDims(),
    ParallelDims(tensor=2),
    ParallelDims(pipeline=2),
    ParallelDims(pipeline=2, virtual_pipeline=2),
    ParallelDims(context=2),
    ParallelDims(data=2),
]
CASES = [
    *(("llama", dims) for dims in DENSE),
    ("qwen3", ParallelDims(context=2)),
    pytest.param("qwen3", ParallelDims(tensor=2, context=2), marks=pytest.mark.slow),
    pytest.param("qwen3", ParallelDims(tensor=2, pipeline=2), marks=pytest.mark.slow),
    ("qwen3_moe", ParallelDims()),
    ("qwen3_moe", ParallelDims(expert=2, data=2)),
    # Latents: heads of values have another size than those of queries and keys.
    ("deepseek_v3", ParallelDims(tensor=2)),
    ("deepseek_v3", ParallelDims(context=2)),
]
Gradients = dict[str, torch.Tensor]


class Case:
    """A model, groups of completions, and the oracle's answers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, experts_implementation="eager"
        )
        generator = torch.Generator().manual_seed(1)

        def draw(low: int, high: int, size: int) -> list[int]:
            return torch.randint(low, high, (size,), generator=generator).tolist()

        def near(logprobs: torch.Tensor, scale: float) -> torch.Tensor:
            noise = scale * torch.randn(logprobs.shape, generator=generator)
            return (logprobs + noise).float().double()

        self.prompts = [prompt for n in PROMPTS for prompt in [draw(4, 250, n)] * NUM_GENERATIONS]
        lengths = draw(1, MAX_COMPLETION_LENGTH + 1, NUM_SEQUENCES)
        lengths[EMPTY] = 0
        self.completions = [draw(4, 250, n) for n in lengths]
        self.advantages = torch.randn(NUM_SEQUENCES, generator=generator).tolist()
        with torch.no_grad():
            exact = oracle_logprobs(model, self.prompts, self.completions, TEMPERATURE)
        self.old_logprobs = [near(logprobs, 0.4) for logprobs in exact]
        self.rollout_logprobs = [near(logprobs, 0.1) for logprobs in self.old_logprobs]
        answers = {
            name: oracle_model_loss(
                model,
                self.prompts,
                self.completions,
                self.advantages,
                OracleLoss(
                    max_completion_length=MAX_COMPLETION_LENGTH,
                    beta=BETA,
                    temperature=TEMPERATURE,
                    **recipe,
                ),
                old_logprobs=self.old_logprobs,
                ref_logprobs=[0.95 * old for old in self.old_logprobs],
                rollout_logprobs=self.rollout_logprobs,
            )
            for name, recipe in RECIPES.items()
        }
        self.answers = {  # by the names of the weight files, where each expert has its own
            name: (loss, revert_weight_conversion(model, gradients))
            for name, (loss, gradients) in answers.items()
        }

    def experience(self) -> Experience:
        samples = [
            Sample(
                prompt=Prompt(index=i // NUM_GENERATIONS, token_ids=tuple(prompt), text="", row={}),
                sample_index=i % NUM_GENERATIONS,
                completion_ids=tuple(completion),
                logprobs=tuple(logprobs.tolist()),
                finish_reason="stop",
                text="",
                policy_version=0,
            )
            for i, (prompt, completion, logprobs) in enumerate(
                zip(self.prompts, self.completions, self.rollout_logprobs, strict=True)
            )
        ]
        return Experience(
            samples,
            [],
            torch.zeros(NUM_SEQUENCES, dtype=torch.float64),
            torch.arange(NUM_SEQUENCES) // NUM_GENERATIONS,
            torch.tensor(self.advantages, dtype=torch.float64),
            old_logprobs=[old.float() for old in self.old_logprobs],
            ref_logprobs=[0.95 * old.float() for old in self.old_logprobs],
        )


@pytest.fixture(scope="module")
def cases(tmp_path_factory: Any) -> dict[str, Case]:
    return {
        family: Case(
            tiny_model(tmp_path_factory.mktemp(family), family, tied=tied, num_hidden_layers=4)
        )
        for family, tied in (
            ("llama", True),
            ("qwen3", False),
            ("qwen3_moe", False),
            ("deepseek_v3", False),
        )
    }


def config(folder: Path, dims: ParallelDims, recipe: dict[str, Any], budget: int) -> Config:
    return tiny_config(
        folder,
        dims,
        f"train.max_tokens_per_microbatch={budget}",
        f"grpo.generation_batch_size={NUM_SEQUENCES}",
        f"grpo.num_generations={NUM_GENERATIONS}",
        "grpo.shared_prompts=true",
        f"grpo.beta={BETA}",
        *(f"grpo.{name}={value}" for name, value in recipe.items()),
        f"rollout.temperature={TEMPERATURE}",
        f"rollout.max_completion_length={MAX_COMPLETION_LENGTH}",
    )


def gradients_on_rank(
    rank: int, dims: ParallelDims, folder: Path, experience: Experience
) -> dict[tuple[str, int], tuple[int, float, list[Any]]]:
    """For each recipe and budget: tokens computed, the loss, and this rank's boxes of the
    gradient."""
    setup_device(rank)
    groups = init_groups(dims)
    policy = build_policy(config(folder, dims, {}, 4096), read_shape(folder), groups)
    results = {}
    for name, recipe in RECIPES.items():
        for budget in BUDGETS:
            cfg = config(folder, dims, recipe, budget)
            [shares] = split_for_data_parallel(experience, 0, CostModel.transformer(64), cfg)
            alignment = Alignment.of(dims, cfg.parallel.sequence_parallel)
            packed = [share.pack(alignment, share_prompts=True) for share in shares]
            tokens = sum(len(batch.tokens) for batches in packed for batch in batches)
            mine = packed[groups.coordinates.data]
            assert all(len(batch.tokens) <= budget for batch in mine)
            batches = add_logprobs(mine, policy, None, cfg, groups)
            metrics = accumulate_gradient(policy, batches, cfg, groups, BETA)
            loss = torch.tensor(sum(map(float, metrics.losses)), dtype=torch.float64)
            dist.all_reduce(loss, group=groups.data_context)
            dist.all_reduce(loss, group=groups.pipeline)
            results[name, budget] = (tokens, float(loss), gradient_boxes(policy))
    return results


@pytest.mark.parametrize(("family", "dims"), CASES, ids=str)
def test_loss_and_every_gradient_equal_the_float64_oracle(
    cases: dict[str, Case], family: str, dims: ParallelDims
) -> None:
    case = cases[family]
    ranks = run_ranks(
        dims.world_size, gradients_on_rank, dims, case.folder, case.experience(), timeout=240
    )
    unshared = sum(map(len, case.prompts)) + sum(map(len, case.completions))
    for name, (expected_loss, expected) in case.answers.items():
        for budget in BUDGETS:
            assert ranks[0][name, budget][0] < 0.9 * unshared
            boxes = [box for result in ranks for box in result[name, budget][2]]
            actual = {tensor: torch.full_like(g, torch.nan) for tensor, g in expected.items()}
            for tensor, box, values in boxes:
                actual[tensor][box.slices].copy_(values)
            for result in ranks:
                assert result[name, budget][1] == pytest.approx(expected_loss, rel=1e-5)
            for tensor, gradient in expected.items():
                error = (actual[tensor] - gradient).norm() / gradient.norm()
                assert error < 1e-5, f"{tensor}: {error:.1e} for {name}, budget {budget}"
