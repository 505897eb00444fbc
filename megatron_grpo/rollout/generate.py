"""From prompts to experience: generate, score, compare. Rank 0 only."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from checkpoint_convert import ModelShape
from checkpoint_convert.vllm import check_engine
from megatron_grpo.batch.experience import Experience, compare
from megatron_grpo.batch.schedule import BatchSchedule
from megatron_grpo.config.config import Config
from megatron_grpo.data.prompts import PromptStream, end_tokens, load_prompts
from megatron_grpo.data.samples import Sample, first_seed
from megatron_grpo.engines.client import RolloutClient
from megatron_grpo.engines.generation import Generation
from megatron_grpo.engines.pool import Fleet
from megatron_grpo.engines.sampling_params import SamplingParams
from megatron_grpo.engines.server import EngineServers
from megatron_grpo.environments import EnvironmentPool
from megatron_grpo.environments.multi_turn import DialogueGeneration, Turns
from megatron_grpo.evaluation.evaluation import Evaluations
from megatron_grpo.rewards import RewardPools, add_environment_rewards, check_failed, total_rewards
from megatron_grpo.rewards.builtin import reference_fault
from megatron_grpo.rollout.dynamic_sampling import ScoredGroup, Search
from megatron_grpo.timing import PhaseTimer
from megatron_grpo.weight_sync import worker_dtypes, worker_layouts

PROBE_LENGTH = 8
"""Most tokens per sample of the probe."""


@dataclass(frozen=True)
class Collected:
    """A generation as it came from engines and rewards."""

    experience: Experience
    metrics: dict[str, float]
    """Metrics of how it was made, reported by the first step that trains on it."""


class ExperienceSource:
    """The rollout engines, the prompts and the rewards, combined to produce `Experience`.

    Weights are pushed through its `engines`. Engines that it starts itself leave the first GPUs of
    this host to the host's `num_ranks` trainer ranks.
    """

    def __init__(self, cfg: Config, shape: ModelShape, token: str | None, num_ranks: int) -> None:
        # Imported here because transformers takes a second, which no other rank needs.
        from checkpoint_convert.tokenizer import load_tokenizer  # noqa: PLC0415

        self.cfg, self.shape = cfg, shape
        # The engines load while the trainer builds its model.
        logs = cfg.train.run_dir / "logs"
        self._servers = EngineServers(cfg.model, cfg.rollout, logs, token, num_ranks)
        self._pools = RewardPools()
        self.rewards = self._pools.of(cfg.reward)
        self.environments: EnvironmentPool | None = None
        if cfg.environment.name is not None:
            self.environments = EnvironmentPool(cfg.environment)
        tokenizer = load_tokenizer(cfg.model.path)
        self.engines = RolloutClient(Fleet(self._servers, cfg.rollout), cfg.rollout)
        self._end_tokens = end_tokens(shape, tokenizer, cfg.rollout)
        self._tokenizer = tokenizer
        self._open: Generation | DialogueGeneration | None = None
        self._search: Search | None = None
        self._policy_version = 0
        """Version of the weights that the search samples from."""
        # The preflight has warned already.
        fault_of = reference_fault(cfg.reward)
        context = shape.max_position_embeddings
        prompts = load_prompts(cfg, tokenizer, context, fault_of=fault_of, warns=False)
        num_prompts = BatchSchedule.of(cfg.grpo).num_prompts
        self.stream = PromptStream(prompts, num_prompts, cfg.train.seed, cfg.data.shuffle)
        self.evaluations = Evaluations(
            cfg, shape, tokenizer, self.engines, self._pools, self.environments
        )

    def wait_for_memory(self) -> None:
        """Return when engines that share GPUs with trainer ranks have allocated their memory.

        Such engines measure how much is free, so the trainer must wait. In sleep mode they have
        given it back when this returns. Other engines load while the trainer builds its model.
        Raises what `wait_ready` raises.
        """
        if self.cfg.rollout.enable_sleep_mode:
            self.wait_ready()
            self.engines.sleep()
        elif self._servers.share_gpus:
            self._servers.wait_ready(self.cfg.rollout.startup_timeout)

    def wait_ready(self) -> None:
        """Return when every engine answers; raises when one is dead or late.

        Raises ValueError that names the parameters of an engine that a push would not fill.
        """
        self._servers.wait_ready(self.cfg.rollout.startup_timeout)
        layouts = worker_layouts(self.shape, self.cfg.rollout)
        dtypes = worker_dtypes(self.shape, self.cfg.rollout, self.cfg.model.dtype)
        for url, workers in self.engines.describe_parameters().items():
            try:
                check_engine(layouts, workers, dtypes)
            except ValueError as error:
                raise ValueError(f"rollout engine {url}: {error}") from None

    def collect(self, generation: int, policy_version: int, timer: PhaseTimer) -> Collected:
        """Sample the prompts of `generation` from weights `policy_version`, and score the samples.

        The engines must serve that version. Raises EnginesOut when none does any more: when called
        again, it continues after a push of the same version, and starts over after a push of
        another. Raises Preempted or ScoringGivenUp when `cancel` was called, and RewardError when
        too many rewards failed. Call it from one thread at a time.
        """
        if policy_version != self._policy_version:
            self._begin_anew()
            self._policy_version = policy_version
        search = self._search = self._search or Search(self.stream, generation, self.cfg.grpo)
        num_engines = 0
        while search.prompts:
            with timer.phase("generate"):
                self._open = self._open or self._ask(search, generation, policy_version)
                samples, num_engines = self._generate(self._open)
            with timer.phase("score"):
                rewards = self._score(samples)
            search.take(self._groups(samples, rewards))
            # Failures of functions and of the environment, over all rounds.
            check_failed(search.num_failed, search.num_scored, self.cfg.reward)
        self._search = None
        groups = search.groups()
        experience = compare(
            [sample for group in groups for sample in group.samples],
            [reward for group in groups for reward in group.rewards],
            self.cfg,
        )
        metrics: dict[str, float] = {
            "rollout/num_engines": num_engines,  # that answered in the last round
            "reward/failed": search.num_failed,  # including replaced prompts
        }
        if self.cfg.grpo.dynamic_sample:
            metrics["rollout/num_resampled_prompts"] = search.num_replaced
            metrics |= {f"unfiltered/{name}": value for name, value in search.unfiltered.items()}
        return Collected(experience, metrics)

    def _begin_anew(self) -> None:
        """Drop the open requests and the search of a generation from weights that are gone."""
        if isinstance(self._open, DialogueGeneration):
            self._open.abandon()
        self._open = self._search = None

    def _score(self, samples: Sequence[Sample]) -> list[dict[str, float]]:
        # In a round that only replaces prompts, too, the limit is a share of a whole generation.
        size = max(self.cfg.grpo.generation_batch_size, len(samples))
        rewards = self.rewards.score(samples, num_completions=size)
        if self.environments:
            add_environment_rewards(rewards, samples)
        return rewards

    def _groups(
        self, samples: Sequence[Sample], rewards: Sequence[dict[str, float]]
    ) -> list[ScoredGroup]:
        totals = total_rewards(rewards, self.cfg.reward_terms)
        size = self.cfg.grpo.num_generations
        return [
            ScoredGroup(samples[i : i + size], rewards[i : i + size], totals[i : i + size])
            for i in range(0, len(samples), size)
        ]

    def probe(self, policy_version: int) -> Experience:
        """Short, unscored samples of the first prompts; the same in every run of this config."""
        length = min(PROBE_LENGTH, self.cfg.rollout.max_completion_length)
        params = replace(self._params(0, 0, policy_version), max_completion_length=length)
        self._open = self._open or Generation(self.stream.batch(0), params)
        samples, _ = self._generate(self._open)
        # Cut short on purpose: overlong_filter must not mask them.
        samples = [replace(sample, finish_reason="stop") for sample in samples]
        nothing = torch.zeros(len(samples), dtype=torch.float64)
        return Experience(samples, [], nothing, nothing.long(), nothing)

    def _ask(
        self, search: Search, generation: int, policy_version: int
    ) -> Generation | DialogueGeneration:
        """The requests of one round of `generation`; environments start at once."""
        params = self._params(generation, search.round, policy_version)
        if self.environments is None:
            return Generation(search.prompts, params)
        self.environments.wait_ready([prompt.row for prompt in self.stream.prompts])
        return DialogueGeneration(
            search.prompts,
            params,
            environments=self.environments,
            turns=Turns.of(self.cfg, self._tokenizer, self._end_tokens),
            max_turns=self.cfg.environment.max_turns,
        )

    def _params(self, generation: int, round_number: int, policy_version: int) -> SamplingParams:
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

    def _generate(self, requests: Generation | DialogueGeneration) -> tuple[list[Sample], int]:
        """The samples, and the number of engines that made them."""
        samples = self.engines.generate(requests)
        self._open = None
        if isinstance(requests, DialogueGeneration):
            requests.tell_failures()
        return samples, len(requests.engines)

    def cancel(self) -> None:
        """Soon end a running `collect`, evaluation or wait for engines; safe from any thread."""
        self.engines.cancel()
        self._pools.cancel()

    def close(self) -> None:
        """Stop the reward workers, the environments, and the engines that were started here."""
        self._pools.close()
        if self.environments:
            self.environments.close()
        self._servers.close()
