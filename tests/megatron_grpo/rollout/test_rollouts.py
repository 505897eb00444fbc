"""The handling of a failed generation, in the calling thread or in a background one."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from megatron_grpo.engines import EngineError, NoServingEngine, RolloutAborted
from megatron_grpo.environments import EnvironmentsLost
from megatron_grpo.launch.process import Preempted
from megatron_grpo.rewards import RewardError
from megatron_grpo.rollout.rollouts import Asked, Collector
from megatron_grpo.timing import PhaseTimer


def waited_for(error: Exception, thread: ThreadPoolExecutor | None, is_preempted: bool) -> None:
    """Wait for generation 3, which raises `error`."""

    def collect(*_) -> None:
        raise error

    source = SimpleNamespace(collect=collect)
    collector = Collector(source, thread, SimpleNamespace(is_preempted=is_preempted), None)
    collector.begin(Asked(generation=3, policy_version=1))
    collector.wait(PhaseTimer(lambda phase: None))


@pytest.fixture(params=[False, True], ids=["synchronous", "beside the training"])
def thread(request):
    with ThreadPoolExecutor(1) as executor:
        yield executor if request.param else None


@pytest.mark.parametrize("kind", [RewardError, TimeoutError, EngineError, EnvironmentsLost])
def test_what_ends_a_run_lets_all_ranks_save_first(kind, thread):
    with pytest.raises(RolloutAborted, match="generation 3 failed: by fire"):
        waited_for(kind("by fire"), thread, is_preempted=False)


@pytest.mark.parametrize("kind", [NoServingEngine, RolloutAborted])
def test_engines_that_are_gone_are_told_as_they_are(kind, thread):
    with pytest.raises(kind, match=r"^by fire$"):
        waited_for(kind("by fire"), thread, is_preempted=False)


def test_a_mistake_of_the_program_is_not_taken_for_a_failure(thread):
    with pytest.raises(KeyError):
        waited_for(KeyError("choices"), thread, is_preempted=False)


def test_what_fails_when_the_machine_is_wanted_back_is_no_failure(thread):
    with pytest.raises(Preempted):
        waited_for(EnvironmentsLost("by fire"), thread, is_preempted=True)
