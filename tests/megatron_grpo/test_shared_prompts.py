"""Computing the prompt of a group only once does not change loss and gradient.

Over layouts, microbatch budgets and recipes, against a padded, single-process computation in
float64 on the `transformers` model, which repeats every prompt.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from helpers.models.tiny import tiny_model
from helpers.oracle.train_steps import BUDGETS, Case, assert_equal, assert_logged, config, on_ranks
from megatron_grpo.batch.distribute import split_for_data_parallel
from megatron_grpo.data.samples import Branch, Sample
from parallel import ParallelDims
from parallel.alignment import Alignment
from parallel.microbatches import CostModel

GROUPS = {23: 4, 1: 2, 2: 2, 40: 4}
"""Completions by length of prompt. The prompt of one token has nothing to share; another saves
nothing once aligned."""
SHARED = "grpo.shared_prompts=true"
RECIPES: dict[str, dict[str, Any]] = {
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.3, "delta": 1.5},
    "gspo, forking tokens": {
        "loss_type": "grpo",
        "epsilon": 0.03,
        "epsilon_high": 0.04,
        "importance_sampling_level": "sequence",
        "use_bias_correction_kl": True,
        # The first tokens of a prompt's completions have equal entropies: no threshold lies there.
        "top_entropy_quantile": 0.4,
        "entropy_coef": 0.3,
    },
}
# Without a threshold: entropies are equal where branches part, too.
BRANCHED = {
    "dapo": RECIPES["dapo"],
    "gspo": {
        name: value for name, value in RECIPES["gspo, forking tokens"].items() if "top_" not in name
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
    # Latents: values have another head size than queries and keys.
    ("deepseek_v3", ParallelDims(tensor=2)),
    ("deepseek_v3", ParallelDims(context=2)),
    # Indexers, which choose from the prompt and the completion.
    ("deepseek_v32", ParallelDims()),
    ("deepseek_v32", ParallelDims(tensor=2)),
    ("deepseek_v32", ParallelDims(context=2)),
    ("glm_moe_dsa", ParallelDims(context=2)),
    # Windows shorter than a prompt, which layers see the end of, and two RoPEs.
    ("olmo3", ParallelDims(tensor=2)),
    ("olmo3", ParallelDims(context=2)),
    # Sinks.
    ("gpt_oss", ParallelDims(context=2)),
    # Linear attention, whose memory of a prompt completions and branches go on from.
    ("qwen3_5_text", ParallelDims()),
    ("qwen3_5_text", ParallelDims(tensor=2, context=2)),
    ("nemotron_h", ParallelDims()),
    ("nemotron_h", ParallelDims(tensor=2, context=2)),
]


FAMILIES = (
    *("llama", "qwen3", "qwen3_moe", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "olmo3"),
    *("gpt_oss", "qwen3_5_text", "nemotron_h"),
)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: Any) -> dict[str, Case]:
    return {
        family: Case(
            tiny_model(
                tmp_path_factory.mktemp(family), family, tied=family == "llama", num_hidden_layers=4
            ),
            RECIPES | BRANCHED,
            GROUPS,
        )
        for family in FAMILIES
    }


@pytest.mark.parametrize(("family", "dims"), CASES, ids=str)
def test_loss_and_every_gradient_with_shared_prompts_equal_the_float64_oracle(
    cases: dict[str, Case], family: str, dims: ParallelDims
) -> None:
    case = cases[family]
    runs = [(name, budget) for name in RECIPES for budget in BUDGETS]
    ranks = on_ranks(case, dims, case.experience(), runs, SHARED)
    assert_equal(ranks, case.answers)
    assert_logged(ranks, case, SHARED)


@pytest.mark.parametrize("budget", BUDGETS)
def test_tokens_of_shared_prompts_are_packed_once_within_the_budget(
    cases: dict[str, Case], budget: int
) -> None:
    case, dims = cases["llama"], ParallelDims(data=2)
    cfg = config(case.folder, dims, {}, budget, SHARED)
    cost = CostModel.transformer(64)
    [shares] = split_for_data_parallel(case.experience(), 0, cost, cfg, dims, Alignment())
    batches = [batch for share in shares for batch in share.pack(Alignment(), share_prompts=True)]
    assert all(len(batch.tokens) <= budget for batch in batches)
    unshared = sum(map(len, case.prompts)) + sum(map(len, case.completions))
    assert sum(len(batch.tokens) for batch in batches) < 0.9 * unshared


def branched(sample: Sample) -> Sample:
    """The completion with branches: from its first tokens, and from those branches."""
    first, length = len(sample.prompt.token_ids), len(sample.completion_ids)
    if length < 6:
        return sample
    one, two = length // 3, 2 * length // 3
    root = (0, first), (first, first + one - 1)
    branches = (
        Branch(((0, first),), 0, one),
        Branch(root, one, two),
        Branch((*root, (first + one, first + two - 1)), two, length),
    )
    return replace(sample, branches=branches)


@pytest.mark.parametrize(
    ("family", "dims"),
    [
        ("llama", ParallelDims()),
        ("llama", ParallelDims(tensor=2)),
        ("qwen3", ParallelDims(context=2)),
        ("qwen3_moe", ParallelDims(expert=2, data=2)),
        ("olmo3", ParallelDims(context=2)),
        ("deepseek_v32", ParallelDims(context=2)),
    ],
    ids=str,
)
def test_shared_parts_of_branches_are_computed_once_without_a_change(
    cases: dict[str, Case], family: str, dims: ParallelDims
) -> None:
    case = cases[family]
    experience = case.experience()
    experience = replace(experience, samples=[*map(branched, experience.samples)])
    runs = [(name, budget) for name in BRANCHED for budget in BUDGETS]
    [alone] = on_ranks(case, ParallelDims(), experience, runs[1::2])
    answers = {}
    for (name, _), (loss, boxes, _) in alone.items():
        gradients = {tensor: torch.zeros_like(g) for tensor, g in case.answers[name][1].items()}
        for tensor, box, values in boxes:
            gradients[tensor][box.slices].copy_(values)
        answers[name] = loss, gradients
    # Float32 on both sides.
    assert_equal(on_ranks(case, dims, experience, runs, SHARED), answers, tolerance=3e-5)
