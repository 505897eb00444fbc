"""The handling of a failed generation, synchronous or made ahead."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers.models import tiny_model
from helpers.scripted_engines import scripted_services
from megatron_grpo.agents.fork_pool import InstancesLost
from megatron_grpo.checkpoints.trainer_state import TrainerState
from megatron_grpo.config.grpo import GRPOConfig
from megatron_grpo.config.rollout import RolloutConfig
from megatron_grpo.engines.http import NoServingEngine, RolloutAborted
from megatron_grpo.launch.process import Preempted
from megatron_grpo.rewards.scoring import RewardError
from megatron_grpo.rollout.runner import GenerationRunner
from megatron_grpo.rollout.schedule import RolloutScheduler
from megatron_grpo.rollout.services import RolloutServices
from megatron_grpo.timing import PhaseTimer


@pytest.fixture(params=[0, 1], ids=["synchronous", "beside the training"])
def services(request, tmp_path: Path) -> Iterator[RolloutServices]:
    """One push ahead, or none."""
    model = tiny_model(tmp_path / "model", "qwen3")
    options = "rollout.in_flight_updates=false", f"rollout.max_staleness={request.param}"
    with scripted_services(model, tmp_path, *options) as services:
        yield services


@pytest.fixture
def finish(services):
    """Begins generation 3, which raises an error, and waits for it."""

    def finish(error: Exception, is_preempted: bool = False) -> None:
        services.engine.version = 1
        services.engine.answers.set()
        services.score.error = error
        watchdog = SimpleNamespace(is_preempted=is_preempted)
        timeline = SimpleNamespace(add_rollout=lambda *args, **about: None)
        state = TrainerState(step=1)
        with closing(GenerationRunner(services, watchdog, timeline, state)) as runner:
            runner.begin(3, policy_version=1)
            runner.finish(3, PhaseTimer(lambda phase: None))

    return finish


@pytest.mark.parametrize(
    ("error", "told"),
    [
        # All ranks save first.
        *((kind, RolloutAborted) for kind in (RewardError, TimeoutError, InstancesLost)),
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
        finish(InstancesLost("by fire"), is_preempted=True)


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
