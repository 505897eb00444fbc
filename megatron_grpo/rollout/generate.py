"""From prompts to experience: generate, score, compare. Rank 0 only."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING

from checkpoint_convert import ModelShape
from checkpoint_convert.vllm import check_engine
from megatron_grpo.agents.agents import open_dialogues
from megatron_grpo.bars import Show, waiting
from megatron_grpo.batch.experience import Experience
from megatron_grpo.config.config import Config
from megatron_grpo.data.prompts import end_tokens, load_prompts
from megatron_grpo.data.samples import Sample, first_seed
from megatron_grpo.data.stream import PromptStream
from megatron_grpo.engines.client import RolloutClient
from megatron_grpo.engines.generation import CompletionRequests, SampleRequests
from megatron_grpo.engines.in_flight import InFlight
from megatron_grpo.engines.layouts import holdings
from megatron_grpo.engines.pool import EnginePool
from megatron_grpo.engines.reward_models import RewardModels
from megatron_grpo.engines.sampling_params import SamplingParams
from megatron_grpo.engines.server import EngineServers
from megatron_grpo.evaluation.evaluation import Evaluations
from megatron_grpo.rewards import RewardPools
from megatron_grpo.rewards.by_source import RewardsBySource, reference_faults
from megatron_grpo.rollout.dynamic_sampling import DynamicSampler, ScoredGroup, as_experience
from megatron_grpo.rollout.group_scorer import EarlyScores, GroupScorer
from megatron_grpo.timing import IDLE, WAIT, PhaseTimer, Timeline
from megatron_grpo.workers.child_process import COLLECTOR

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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


def load_stream(
    cfg: Config, shape: ModelShape, tokenizer: "PreTrainedTokenizerBase"
) -> PromptStream:
    """The prompts of a run; the preflight has warned of rows that are left out."""
    context, fault_of = shape.max_position_embeddings, reference_faults(cfg)
    prompts = load_prompts(cfg, tokenizer, context, fault_of=fault_of, warns=False)
    return PromptStream.of(cfg, prompts)


class Rollouter:
    """The rollout engines, the prompts and the rewards of a run.

    Weights are pushed through its `engines`. Engines that it starts itself leave the first GPUs of
    this host to the host's `num_ranks` trainer ranks.
    """

    def __init__(self, cfg: Config, shape: ModelShape, token: str | None, num_ranks: int) -> None:
        # Imported here because transformers takes a second, which no other rank needs.
        from checkpoint_convert.tokenizer import load_tokenizer  # noqa: PLC0415

        self.cfg, self.shape = cfg, shape
        self.threads: ThreadPoolExecutor | None = None
        """Make generations ahead. They end after the engines: when the thread that started an
        engine ends, Linux ends the engine."""
        if num_ahead := cfg.rollout.max_staleness:
            num_threads = num_ahead + 1 if cfg.rollout.in_flight_updates else 1
            self.threads = ThreadPoolExecutor(num_threads, thread_name_prefix=COLLECTOR)
        # The engines load while the trainer builds its model.
        logs = cfg.train.run_dir / "logs"
        self.servers = EngineServers(cfg.model, cfg.rollout, logs, token, num_ranks, cfg.lora)
        self.pools = RewardPools(RewardModels.of_run(cfg, logs, num_ranks, self.servers))
        self.rewards = RewardsBySource(cfg.by_source, self.pools)
        tokenizer = load_tokenizer(cfg.model.path)
        pool = EnginePool.of_run(self.servers, cfg)
        # Workers of SGLang drop those of a tower that a push fills.
        keeps_features = cfg.model.freeze_vision or cfg.rollout.engine != "vllm"
        self.engines = RolloutClient(pool, cfg.rollout, cfg.lora, keeps_features=keeps_features)
        self.in_flight: InFlight | None = None
        """Has the engines work on several generations at a time; None if they make one after the
        other."""
        self._decode = partial(tokenizer.decode, skip_special_tokens=True)
        if cfg.rollout.in_flight_updates:
            # Streamed chunks do not have the experts of tokens.
            streams = not cfg.rollout.router_replay
            self.in_flight = InFlight(self.engines, self._decode, streams=streams)
        self.scorer = GroupScorer(cfg, self.rewards, self._decode)
        self._end_tokens = end_tokens(shape, tokenizer, cfg.rollout)
        self.tokenizer = tokenizer
        self.dialogues = open_dialogues(
            cfg, tokenizer, self._end_tokens, self.engines, self.in_flight
        )
        self.stream = load_stream(cfg, shape, tokenizer)
        self.evaluations = Evaluations(
            cfg, shape, tokenizer, self.engines, self.pools, self.dialogues
        )

    def wait_for_memory(self) -> None:
        """Return when engines that share GPUs with trainer ranks have allocated their memory.

        Such engines measure how much is free, so the trainer must wait. In sleep mode they have
        given it back when this returns. Other engines load while the trainer builds its model.
        Raises what `wait_ready` raises.
        """
        with waiting(self.servers.awaited, "answer") as show:
            if self.cfg.rollout.enable_sleep_mode:
                self.wait_ready(show)
                self.engines.sleep()
            elif self.servers.share_gpus:
                self.servers.wait_ready(self.cfg.rollout.startup_timeout, show)

    def wait_ready(self, show: Show) -> None:
        """Return when every engine answers; raises when one is dead or late.

        `show` is called with the numbers of engines that answer and of all. Raises ValueError that
        names the parameters of an engine that a push would not fill.
        """
        self.servers.wait_ready(self.cfg.rollout.startup_timeout, show)
        held = holdings(self.cfg, self.shape)
        for url, workers in self.engines.describe_parameters().items():
            try:
                check_engine(held.all, workers, held.dtypes)
            except ValueError as error:
                raise ValueError(f"rollout engine {url}: {error}") from None

    def sampling_params(
        self, generation: int, round_number: int, policy_version: int
    ) -> SamplingParams:
        """How the samples of one round of a generation are made."""
        rollout, seed = self.cfg.rollout, self.cfg.train.seed
        return SamplingParams(
            num_generations=self.cfg.grpo.num_generations,
            policy_version=policy_version,
            temperature=rollout.temperature,
            max_completion_length=rollout.max_completion_length,
            stop_token_ids=self._end_tokens,
            stop=rollout.stop,
            router_replay=rollout.router_replay,
            # No two rounds of a generation share seeds; no prompt has a position below 0.
            seed=first_seed(seed, generation, -round_number) if round_number else seed,
            series=generation,
        )

    def cancel(self) -> None:
        """Soon end a running rollout, evaluation or wait for engines; safe from any thread."""
        self.engines.cancel()
        self.pools.cancel()

    def close(self) -> None:
        """Stop the reward workers, the environments, and the engines that were started here."""
        with ExitStack() as stack:
            if self.threads:  # last: Linux kills the engines that they started when they end
                stack.callback(self.threads.shutdown)
            if self.in_flight:
                stack.callback(self.in_flight.close)
            stack.callback(self.servers.close)
            if self.dialogues:
                stack.callback(self.dialogues.close)
            stack.callback(self.pools.close)
            stack.callback(self.scorer.close)
            if self.in_flight:  # it would start ended engines again
                stack.callback(self.in_flight.end)


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

    def restore(
        self, samples: Sequence[Sample], scored: Sequence[ScoredGroup], engines: set[str]
    ) -> None:
        """Continue a generation of a checkpoint, before it is started: with its `samples`, those of
        its groups that were `scored`, and the addresses of `engines` that had answered."""
        self.open = self._new_requests()
        assert isinstance(self.open, CompletionRequests), "a checkpoint holds no dialogues"
        self.open.restore(samples)
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
