"""The handling of a failed generation, in the calling thread or in a background one."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from megatron_grpo.config.grpo import GRPOConfig
from megatron_grpo.config.rollout import RolloutConfig
from megatron_grpo.engines.http import NoServingEngine, RolloutAborted
from megatron_grpo.environments import EnvironmentsLost
from megatron_grpo.launch.process import Preempted
from megatron_grpo.rewards.scoring import RewardError
from megatron_grpo.rollout.generate import Rollout, RolloutRequest
from megatron_grpo.rollout.rollouts import RolloutScheduler
from megatron_grpo.rollout.runner import RolloutRunner
from megatron_grpo.timing import PhaseTimer


@pytest.fixture
def finish(thread, monkeypatch):
    """Begins generation 3, which raises an error, and waits for it."""

    def finish(error: Exception, is_preempted: bool = False) -> None:
        def run(rollout: Rollout, timer: PhaseTimer) -> None:
            raise error

        monkeypatch.setattr(Rollout, "run", run)
        stream = SimpleNamespace(batch=lambda generation: [])
        cfg, nothing = SimpleNamespace(grpo=None), dict.fromkeys(("scorer", "in_flight"))
        rollouter = SimpleNamespace(threads=thread, stream=stream, cfg=cfg, **nothing)
        watchdog = SimpleNamespace(is_preempted=is_preempted)
        timeline = SimpleNamespace(add_rollout=lambda *args, **about: None)
        runner = RolloutRunner(rollouter, watchdog, timeline)
        runner.begin(RolloutRequest(generation=3, policy_version=1))
        runner.finish(3, PhaseTimer(lambda phase: None))

    return finish


@pytest.fixture(params=[False, True], ids=["synchronous", "beside the training"])
def thread(request):
    with ThreadPoolExecutor(1) as executor:
        yield executor if request.param else None


@pytest.mark.parametrize(
    ("error", "told"),
    [
        # All ranks save first.
        *((kind, RolloutAborted) for kind in (RewardError, TimeoutError, EnvironmentsLost)),
        (NoServingEngine, NoServingEngine),
        (KeyError, KeyError),  # a mistake of the program
    ],
)
def test_the_failure_of_a_generation_is_told_for_what_it_is(error, told, finish):
    prefix = "^generation 3 failed: by fire$" if told is RolloutAborted else "^'?by fire'?$"
    with pytest.raises(told, match=prefix):
        finish(error("by fire"))


def test_what_fails_when_the_machine_is_wanted_back_is_no_failure(finish):
    with pytest.raises(Preempted):
        finish(EnvironmentsLost("by fire"), is_preempted=True)


def test_what_a_failed_push_has_suspended_is_not_waited_for_before_the_run_is_saved():
    cfg = SimpleNamespace(
        rollout=RolloutConfig(
            max_completion_length=8, max_staleness=2, in_flight_updates=True, engine="vllm"
        ),
        grpo=GRPOConfig(num_generations=2, generation_batch_size=4),
        has_dialogues=True,  # a checkpoint holds none
        num_steps=9,
    )
    timer = PhaseTimer(lambda phase: None)
    scheduler = RolloutScheduler(cfg, None, lambda step: None)
    scheduler.after_push(0)
    scheduler.request_ahead(0)
    scheduler.before_push(1, timer)  # the push of step 1 fails
    scheduler.finish_for_save(1, timer)
    assert [*scheduler.pending] == [1, 2] and not scheduler.ready
