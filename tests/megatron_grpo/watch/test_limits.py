from pathlib import Path

from megatron_grpo.watch import Limits
from parallel import ParallelDims
from policies import tiny_config


def test_evaluations_and_waits_may_take_as_long_as_the_rollouts_and_rewards_they_are_of() -> None:
    limits = Limits.of(tiny_config(Path("unused"), ParallelDims()))
    for phase in ("generate", "score"):
        for whole in ("eval", "wait_rollout"):
            limit = limits.of_phase(f"{whole}_{phase}", is_first_step=False)
            assert limit == limits.of_phase(phase, is_first_step=False)
    assert limits.of_phase("eval_generate", is_first_step=False) == limits.generate


def test_what_rank_0_packs_alone_may_take_as_long_as_it_took_to_generate() -> None:
    limits = Limits.of(tiny_config(Path("unused"), ParallelDims()))
    pack = limits.of_phase("pack", is_first_step=False)
    assert pack == limits.generate and pack.seconds > 10 * limits.step.seconds
