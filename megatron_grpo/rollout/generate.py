"""From prompts to experience: generate, score, compare. Rank 0 only."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from functools import partial
from queue import SimpleQueue

from megatron_grpo.batch.experience import Experience
from megatron_grpo.data.samples import Sample
from megatron_grpo.engines.generation import CompletionRequests, SampleRequests
from megatron_grpo.rollout.dynamic_sampling import DynamicSampler, ScoredGroup, as_experience
from megatron_grpo.rollout.group_scorer import EarlyScores
from megatron_grpo.rollout.open_samples import Unscored
from megatron_grpo.rollout.rollouter import Rollouter
from megatron_grpo.timing import IDLE, WAIT, PhaseTimer, Timeline


@dataclass(frozen=True)
class RolloutRequest:
    """A generation that the engines make from one version of the weights."""

    generation: int
    policy_version: int
    """Optimizer step of the weights that the engines serve when it is requested."""


@dataclass(frozen=True)
class RolloutBatch:
    """A finished generation, as it came from engines and rewards."""

    experience: Experience
    metrics: dict[str, float]
    """Metrics of how it was made, logged by the first step that trains on it."""
    replaced: Sequence[ScoredGroup] = ()
    """The groups that dynamic sampling replaced; not known of a generation from a checkpoint."""


class Rollout:
    """One generation in progress: its open requests, and the groups found so far.

    It is made by `finish`, or from `start` on if the rollouter has threads. Either may fail with
    NoServingEngine; after a push of the same weights, both continue where they stopped. A
    generation from other weights is another Rollout.
    """

    def __init__(self, rollouter: Rollouter, request: RolloutRequest) -> None:
        self.request = request
        self._rollouter, self._cfg = rollouter, rollouter.cfg
        self.sampler = DynamicSampler(rollouter.stream, request.generation, self._cfg.grpo)
        self.open: SampleRequests | None = None
        """The requests of this round."""
        early = EarlyScores(rollouter.scorer, request.generation)
        self.early = early if rollouter.threads else None
        self.made: Future[RolloutBatch] | None = None
        """The result of the thread, if there is one."""
        self._phases: SimpleQueue[str | None] = SimpleQueue()
        """The phases that the thread enters; None when it ends."""

    def restore(self, groups: Sequence[ScoredGroup | Unscored], engines: set[str]) -> None:
        """Continue a generation of a checkpoint, before it is started: with its `groups`, and the
        addresses of `engines` that had answered."""
        self.open = self._new_requests()
        assert isinstance(self.open, CompletionRequests), "a checkpoint holds no dialogues"
        scored = [group for group in groups if isinstance(group, ScoredGroup)]
        for group in groups:
            self.open.restore(group.samples if isinstance(group, ScoredGroup) else group)
        self.open.engines |= engines
        if self.early:
            self.early.restore(scored)

    def start(self, timeline: Timeline) -> None:
        """Begin to make the generation in a thread, if the rollouter has any."""
        if threads := self._rollouter.threads:
            self._phases = SimpleQueue()
            self.made = threads.submit(self._run_in_thread, timeline)

    def finish(self, timer: PhaseTimer) -> RolloutBatch:
        """Wait for the generation; make it here if there is no thread. Raises what `run` raises.

        While a thread makes it, `timer` enters the thread's phases: the watchdog has a limit for
        each.
        """
        if self.made is None:
            return self.run(timer)
        phase: str | None = IDLE
        while phase is not None:
            with timer.phase(WAIT, phase):
                phase = self._phases.get()
            while not self._phases.empty():  # skip phases that are over
                phase = self._phases.get()
        return self.made.result()

    def run(self, timer: PhaseTimer) -> RolloutBatch:
        """Sample the prompts and score the samples, in as many rounds as dynamic sampling takes.

        The engines must serve the version of the request. Raises NoServingEngine when none does any
        more, Preempted or ScoringCancelled when `Rollouter.cancel` was called, and RewardError when
        too many rewards failed.
        """
        sampler = self.sampler
        while sampler.prompts:
            with timer.phase("generate"):
                self.open = self.open or self._new_requests()
                samples = self._answers(self.open)
                self.open.print_failures()
            with timer.phase("score"):
                early, scorer = self.early, self._rollouter.scorer
                groups = early.scored_groups(samples) if early else scorer.score(samples)
            sampler.add_groups(groups)
            self.open = None if sampler.prompts else self.open
            # Failures of functions and of the environment, over all rounds.
            sampler.tally.check_failed(self._cfg.reward)
        return self._batch()

    def abandon(self) -> None:
        """Drop the open requests, and end what they have started."""
        if self.open:
            self.open.abandon()
        if self.early:
            self.early.abandon()

    def _run_in_thread(self, timeline: Timeline) -> RolloutBatch:
        """`run` in a thread; the metrics include the seconds that it took."""
        record = partial(timeline.add_rollout, **asdict(self.request))
        timer = PhaseTimer(self._phases.put, record)
        try:
            made = self.run(timer)
            seconds = timer.metrics()
            del seconds["time/step"]
            return replace(made, metrics={**made.metrics, **seconds})
        finally:
            self._phases.put(None)

    def _new_requests(self) -> SampleRequests:
        """The requests of this round; dialogues begin at once."""
        rollouter, request, prompts = self._rollouter, self.request, self.sampler.prompts
        params = rollouter.sampling_params(
            request.generation, self.sampler.round, request.policy_version
        )
        requests: SampleRequests
        if dialogues := rollouter.dialogues:
            dialogues.wait_ready([prompt.row for prompt in rollouter.stream.prompts])
            requests = dialogues.generation(prompts, params, self._cfg)
        else:
            requests = CompletionRequests(prompts, params)
        if self.early:
            requests.on_group_complete(self.early.begin)
        return requests

    def _answers(self, requests: SampleRequests) -> list[Sample]:
        """All samples of the requests of one round."""
        rollouter = self._rollouter
        if rollouter.in_flight:
            return rollouter.in_flight.generate(self.request.generation, requests)
        return (rollouter.dialogues or rollouter.engines).generate(requests)

    def _batch(self) -> RolloutBatch:
        sampler = self.sampler
        num_engines = len(self.open.engines) if self.open else 0  # in the last round
        metrics = sampler.tally.metrics(sampler.num_replaced, self._cfg.grpo)
        metrics["rollout/num_engines"] = num_engines
        experience = as_experience(sampler.groups(), self._cfg)
        return RolloutBatch(experience, metrics, sampler.replaced())
