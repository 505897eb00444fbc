"""Neither an optimizer step nor a log-probability pass ever holds the logits of a microbatch."""

from pathlib import Path

import pytest

from helpers.models.tiny import tiny_model
from helpers.oracle.policies import pack_all, start_policy, tiny_config
from helpers.ranks.measure import LargestTensor
from helpers.ranks.processes import run_ranks
from megatron_grpo.algorithm.loss_function import LossFunction
from megatron_grpo.batch.token_values import with_entropy_weights
from megatron_grpo.policy.forward import compute_logprobs
from megatron_grpo.policy.skipped_steps import SkippedSteps
from megatron_grpo.train_step import train_step
from parallel import ParallelDims

VOCAB_SIZE, LENGTHS = 49152, [[(64, 448), (32, 480)]]
NUM_LOGITS = VOCAB_SIZE * sum(map(sum, LENGTHS[0]))
OVERRIDES = (
    "grpo.generation_batch_size=2",
    "grpo.num_generations=2",
    "grpo.beta=0",
    "grpo.entropy_coef=0.1",
)


def largest_tensors(rank: int, folder: Path, dims: ParallelDims) -> tuple[int, int]:
    """Elements of the largest tensor in a log-probability pass, and in a step."""
    cfg = tiny_config(folder, dims, *OVERRIDES)
    policy, groups = start_policy(rank, folder, dims, *OVERRIDES)
    batches = with_entropy_weights(pack_all(LENGTHS, dims), groups)
    with LargestTensor() as of_pass:
        compute_logprobs(policy, batches, 1.0, groups)
    with LargestTensor() as of_step:
        train_step(policy, batches, cfg, groups, LossFunction.of(cfg.grpo), SkippedSteps(1), 0.0)
    return of_pass.num_elements, of_step.num_elements


@pytest.mark.parametrize("tensor", [1, 2])
def test_no_tensor_is_as_large_as_an_eighth_of_the_logits_of_a_rank(tensor, tmp_path):
    folder = tiny_model(tmp_path, "llama", tied=True, vocab_size=VOCAB_SIZE, hidden_size=32)
    dims = ParallelDims(tensor=tensor)
    for of_pass, of_step in run_ranks(tensor, largest_tensors, folder, dims):
        assert of_pass < NUM_LOGITS / tensor / 8
        assert of_step < NUM_LOGITS / tensor / 8
