from pathlib import Path

from megatron_grpo.watch import Limits
from parallel import ParallelDims
from policies import tiny_config


def test_an_evaluation_may_take_as_long_as_the_rollouts_and_rewards_that_it_is_made_of() -> None:
    limits = Limits.of(tiny_config(Path("unused"), ParallelDims()))
    for evaluation, training in (("eval_generate", "generate"), ("eval_score", "score")):
        limit = limits.of_phase(evaluation, is_first_step=False)
        assert limit == limits.of_phase(training, is_first_step=False)
    assert limits.of_phase("eval_generate", is_first_step=False) == limits.generate
