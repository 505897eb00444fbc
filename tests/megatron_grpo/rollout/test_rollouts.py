"""The handling of a failed generation, in the calling thread or in a background one."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from megatron_grpo.engines import EngineError, NoServingEngine, RolloutAborted
from megatron_grpo.environments import EnvironmentsLost
from megatron_grpo.launch.process import Preempted
from megatron_grpo.rewards import RewardError
from megatron_grpo.rollout import rollouts as module
from megatron_grpo.rollout.generate import RolloutRequest
from megatron_grpo.rollout.rollouts import RolloutRunner
from megatron_grpo.timing import PhaseTimer


class Failing:
    """Stands for a generation that fails."""

    def __init__(self, error: Exception, request: RolloutRequest) -> None:
        self.error, self.request = error, request

    def run(self, timer: PhaseTimer) -> None:
        raise self.error


@pytest.fixture
def finish(monkeypatch, thread):
    """Begins generation 3, which raises an error, and waits for it."""

    def finish(error: Exception, is_preempted: bool = False) -> None:
        monkeypatch.setattr(module, "Rollout", lambda _, request: Failing(error, request))
        watchdog = SimpleNamespace(is_preempted=is_preempted)
        runner = RolloutRunner(SimpleNamespace(thread=thread), watchdog, None)
        runner.begin(RolloutRequest(generation=3, policy_version=1))
        runner.finish(PhaseTimer(lambda phase: None))

    return finish


@pytest.fixture(params=[False, True], ids=["synchronous", "beside the training"])
def thread(request):
    with ThreadPoolExecutor(1) as executor:
        yield executor if request.param else None


@pytest.mark.parametrize("kind", [RewardError, TimeoutError, EngineError, EnvironmentsLost])
def test_what_ends_a_run_lets_all_ranks_save_first(kind, finish):
    with pytest.raises(RolloutAborted, match="generation 3 failed: by fire"):
        finish(kind("by fire"))


@pytest.mark.parametrize("kind", [NoServingEngine, RolloutAborted])
def test_engines_that_are_gone_are_told_as_they_are(kind, finish):
    with pytest.raises(kind, match=r"^by fire$"):
        finish(kind("by fire"))


def test_a_mistake_of_the_program_is_not_taken_for_a_failure(finish):
    with pytest.raises(KeyError):
        finish(KeyError("choices"))


def test_what_fails_when_the_machine_is_wanted_back_is_no_failure(finish):
    with pytest.raises(Preempted):
        finish(EnvironmentsLost("by fire"), is_preempted=True)
