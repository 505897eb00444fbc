from pathlib import Path

import pytest

from megatron_grpo.watchdog.job import MARGIN_SECONDS, Limit, Limits
from parallel import ParallelDims
from parallel.weight_transfer import TIMEOUT
from policies import tiny_config

TIMEOUTS = [
    "rollout.startup_timeout=200",
    "rollout.stall_timeout=30",
    "train.hang_timeout=7",
]
START = Limit(215, "rollout.startup_timeout")
STEP = Limit(7, "train.hang_timeout")
SLOW = Limit(400, "train.hang_timeout")
PUSH = Limit(105, "rollout.stall_timeout")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], Limits(START, STEP, PUSH)),
        (["train.hang_timeout=400"], Limits(START, SLOW, SLOW)),
    ],
    ids=["alone", "slow steps"],
)
def test_each_limit_is_above_the_time_outs_that_its_phase_waits_for(overrides, expected) -> None:
    cfg = tiny_config(Path("unused"), ParallelDims(), *TIMEOUTS, *overrides)
    assert Limits.of(cfg) == expected


def test_limits_are_those_that_the_docs_tell() -> None:
    text = Path("docs/cluster.md").read_text()
    told = f"`rollout.stall_timeout` + {TIMEOUT.total_seconds() + MARGIN_SECONDS:g}, or"
    assert f"| a push of weights, and its checksums | {told} `train.hang_timeout` if" in text
    assert f"| engines start | `rollout.startup_timeout` + {MARGIN_SECONDS:g} |" in text
    assert "| a generation | unlimited, but an engine" in text


@pytest.mark.parametrize("phase", ["generate", "score", "load", "log", "save", "close"])
def test_what_has_limits_of_its_own_or_none_may_take_any_time(phase) -> None:
    limits = Limits.of(tiny_config(Path("unused"), ParallelDims()))
    for whole in ("", "wait_rollout_"):
        assert limits.of_phase(f"{whole}{phase}", is_first_step=False) is None
        assert limits.of_phase(f"{whole}{phase}", is_first_step=True) is None


def test_an_evaluation_may_take_as_long_as_the_rollouts_and_rewards_that_it_is_of() -> None:
    limits = Limits.of(tiny_config(Path("unused"), ParallelDims()))
    for phase in ("eval_generate", "eval_score", "eval_log"):
        assert limits.of_phase(phase, is_first_step=False) is None
