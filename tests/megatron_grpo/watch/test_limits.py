from pathlib import Path

import pytest

from megatron_grpo.watch.limits import MARGIN_SECONDS, Limit, Limits
from parallel import ParallelDims
from parallel.transport import TIMEOUT
from policies import tiny_config

TIMEOUTS = [
    "rollout.request_timeout=1000",
    "rollout.startup_timeout=200",
    "rollout.stall_timeout=30",
    "train.hang_timeout=7",
]
ENVIRONMENT = ["environment.name=a.py:A", "environment.max_turns=3", "environment.timeout=5"]
START = Limit(215, "rollout.startup_timeout")
STEP = Limit(7, "train.hang_timeout")
SLOW = Limit(400, "train.hang_timeout")
GENERATE = Limit(2215, "rollout.request_timeout")
PUSH = Limit(105, "rollout.stall_timeout")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], Limits(START, STEP, GENERATE, PUSH)),
        (ENVIRONMENT, Limits(START, STEP, Limit(5230, "rollout.request_timeout"), PUSH)),
        (["train.hang_timeout=400"], Limits(START, SLOW, GENERATE, SLOW)),
    ],
    ids=["alone", "environment", "slow steps"],
)
def test_each_limit_is_above_the_time_outs_that_its_phase_waits_for(overrides, expected) -> None:
    cfg = tiny_config(Path("unused"), ParallelDims(), *TIMEOUTS, *overrides)
    assert Limits.of(cfg) == expected


def test_limits_are_those_that_the_docs_tell() -> None:
    text = Path("docs/cluster.md").read_text()
    told = f"`rollout.stall_timeout` + {TIMEOUT.total_seconds() + MARGIN_SECONDS:g}, or"
    assert f"| a push of weights, and its checksums | {told} `train.hang_timeout` if" in text
    assert f"| engines start | `rollout.startup_timeout` + {MARGIN_SECONDS:g} |" in text
    assert f"`rollout.startup_timeout` + {MARGIN_SECONDS:g}; with an environment, for each" in text


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
