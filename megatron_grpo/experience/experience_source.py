"""From prompts to experience: generate, score, compare. Lives on rank 0 only."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from checkpoint_convert import ModelShape
from checkpoint_convert.vllm import check_engine
from megatron_grpo.config.config import Config
from megatron_grpo.config.reward_config import ENVIRONMENT_TERM
from megatron_grpo.data.prompts import PromptStream, end_tokens, load_prompts
from megatron_grpo.environments import EnvironmentPool
from megatron_grpo.evaluation.evaluation import Evaluation, as_evaluated, load_eval_prompts
from megatron_grpo.experience.batching import BatchSchedule
from megatron_grpo.experience.dynamic_sampling import ScoredGroup, Search
from megatron_grpo.experience.experience import Experience, compare
from megatron_grpo.rewards import RewardPool, check_failed, total_rewards
from megatron_grpo.rewards.references import reference_fault
from megatron_grpo.rollout.client import RolloutClient
from megatron_grpo.rollout.dialogues import DialogueGeneration
from megatron_grpo.rollout.fleet import Fleet
from megatron_grpo.rollout.generation import Generation
from megatron_grpo.rollout.samples import Sample, first_seed
from megatron_grpo.rollout.server import EngineServers
from megatron_grpo.rollout.turns import Turns
from megatron_grpo.timing import PhaseTimer
from megatron_grpo.weights.worker_layouts import worker_layouts

PROBE_LENGTH = 8
"""Most tokens per sample of the probe."""


@dataclass(frozen=True)
class Collected:
    """A generation as it came from engines and rewards."""

    experience: Experience
    metrics: dict[str, float]
    """What there is to say of how it was made, for the step that first trains on it."""


class ExperienceSource:
    """The rollout engines, the prompts and the rewards, as one thing that yields `Experience`.

    `engines` is how weights reach the engines. Those that it starts leave the first GPUs of this
    host to its `num_ranks` trainer ranks.
    """

    def __init__(self, cfg: Config, shape: ModelShape, token: str | None, num_ranks: int) -> None:
        # Imported here because transformers takes a second, which no other rank needs.
        from checkpoint_convert.tokenizer import load_tokenizer  # noqa: PLC0415

        self.cfg, self.shape = cfg, shape
        # The engines load while the trainer builds its model.
        logs = cfg.train.run_dir / "logs"
        self._servers = EngineServers(cfg.model, cfg.rollout, logs, token, num_ranks)
        self.rewards = RewardPool(cfg.reward)
        self._pools = {self.rewards}
        self.environments: EnvironmentPool | None = None
        if cfg.environment.name is not None:
            self.environments = EnvironmentPool(cfg.environment)
        tokenizer = load_tokenizer(cfg.model.path)
        self.engines = RolloutClient(Fleet(self._servers, cfg.rollout), cfg.rollout)
        self._end_tokens = end_tokens(shape, tokenizer)
        self._tokenizer = tokenizer
        self._open: Generation | DialogueGeneration | None = None
        self._search: Search | None = None
        self._policy_version = 0
        """That the search asks for."""
        # The preflight has warned already.
        fault_of = reference_fault(cfg.reward)
        context = shape.max_position_embeddings
        prompts = load_prompts(cfg, tokenizer, context, fault_of=fault_of, warns=False)
        num_prompts = BatchSchedule.of(cfg.grpo).num_prompts
        self.stream = PromptStream(prompts, num_prompts, cfg.train.seed, cfg.data.shuffle)
        self.evaluation: Evaluation | None = None
        if cfg.eval.data is not None:
            view = as_evaluated(cfg)
            held_out = load_eval_prompts(view, tokenizer, context, warns=False)
            rewards = self.rewards if view.reward == cfg.reward else RewardPool(view.reward)
            self._pools.add(rewards)
            self.evaluation = Evaluation(view, held_out, self._end_tokens, self.engines, rewards)

    def wait_for_memory(self) -> None:
        """Return when engines on GPUs of trainer ranks have taken what is theirs of these.

        They measure what is free. Others load while the trainer builds its model. Raises as
        `wait_ready`.
        """
        if self._servers.share_gpus:
            self._servers.wait_ready(self.cfg.rollout.startup_timeout)

    def wait_ready(self) -> None:
        """Return when every engine answers; raises when one is dead or late.

        ValueError names every parameter of an engine that a push would not fill.
        """
        self._servers.wait_ready(self.cfg.rollout.startup_timeout)
        layouts = worker_layouts(self.shape, self.cfg.rollout)
        for url, workers in self.engines.describe_parameters().items():
            try:
                check_engine(layouts, workers, self.cfg.model.dtype)
            except ValueError as error:
                raise ValueError(f"rollout engine {url}: {error}") from None

    def collect(self, generation: int, policy_version: int, timer: PhaseTimer) -> Collected:
        """Sample the prompts of `generation` from weights `policy_version`, and score the answers.

        The engines must serve that version. Raises EnginesOut when none does any more: called again
        after a push of the same version, it goes on where it ended; of another one, it begins anew.
        Raises Preempted or ScoringGivenUp when `cancel` was called, RewardError when too many
        rewards failed. From one thread at a time.
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
            # Those of functions and of the environment, of all rounds together.
            check_failed(search.num_failed, search.num_scored, self.cfg.reward)
        self._search = None
        groups = search.groups()
        experience = compare(
            [sample for group in groups for sample in group.samples],
            [reward for group in groups for reward in group.rewards],
            self.cfg,
        )
        metrics: dict[str, float] = {
            "rollout/num_engines": num_engines,  # that have answered, in the last round
            "reward/failed": search.num_failed,  # replaced ones as well
        }
        if self.cfg.grpo.dynamic_sample:
            metrics["rollout/num_resampled_prompts"] = search.num_replaced
        return Collected(experience, metrics)

    def _begin_anew(self) -> None:
        """Leave what is open of a generation from weights that are gone."""
        if isinstance(self._open, DialogueGeneration):
            self._open.abandon()
        self._open = self._search = None

    def _score(self, samples: Sequence[Sample]) -> list[dict[str, float]]:
        # Of a round that only replaces prompts, failures are still a share of a generation.
        size = self.cfg.grpo.generation_batch_size
        rewards = self.rewards.score(samples, num_completions=size)
        if self.environments:
            for reward, sample in zip(rewards, samples, strict=True):
                reward[ENVIRONMENT_TERM] = sample.environment_reward
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
        """Short samples of the first prompts, unscored: the same in every run of this config."""
        self._open = self._open or Generation(
            self.stream.batch(0),
            max_completion_length=PROBE_LENGTH,
            **self._sampling(0, 0, policy_version),
        )
        samples, _ = self._generate(self._open)
        # Cut short on purpose: no filter is to leave them out.
        samples = [replace(sample, finish_reason="stop") for sample in samples]
        nothing = torch.zeros(len(samples), dtype=torch.float64)
        return Experience(samples, [], nothing, nothing.long(), nothing)

    def _ask(
        self, search: Search, generation: int, policy_version: int
    ) -> Generation | DialogueGeneration:
        """What a round of `generation` has the engines do; environments begin at once."""
        cfg = self.cfg
        most = cfg.rollout.max_completion_length
        sampling = self._sampling(generation, search.round, policy_version)
        if self.environments is None:
            return Generation(search.prompts, max_completion_length=most, **sampling)
        self.environments.wait_ready([prompt.row for prompt in self.stream.prompts])
        return DialogueGeneration(
            search.prompts,
            max_completion_length=most,
            environments=self.environments,
            turns=Turns.of(cfg, self._tokenizer, self._end_tokens),
            max_turns=cfg.environment.max_turns,
            **sampling,
        )

    def _sampling(self, generation: int, round_number: int, policy_version: int) -> dict[str, Any]:
        seed = self.cfg.train.seed
        return {
            "num_generations": self.cfg.grpo.num_generations,
            "temperature": self.cfg.rollout.temperature,
            "stop_token_ids": self._end_tokens,
            # No two rounds of a generation share seeds; no prompt has a position below 0.
            "seed": first_seed(seed, generation, -round_number) if round_number else seed,
            "step": generation,
            "policy_version": policy_version,
        }

    def _generate(self, requests: Generation | DialogueGeneration) -> tuple[list[Sample], int]:
        """The samples, and how many engines have made them."""
        samples = self.engines.generate(requests)
        self._open = None
        if isinstance(requests, DialogueGeneration) and (failures := requests.failures):
            told = f"the environment failed in {len(failures)} samples, the first of them: "
            print(told + failures[0], file=sys.stderr)
        return samples, len(requests.engines)

    def cancel(self) -> None:
        """End a running `collect` or evaluation, and waits for engines, soon; from any thread."""
        self.engines.cancel()
        for pool in self._pools:
            pool.cancel()

    def close(self) -> None:
        """End the reward workers, the environments and the engines that were started here."""
        for pool in self._pools:
            pool.close()
        if self.environments:
            self.environments.close()
        self._servers.close()
