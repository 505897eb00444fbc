"""From prompts to experience: generate, score, compare. Lives on rank 0 only."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoTokenizer

from checkpoint_convert import ModelShape
from megatron_grpo.advantages import group_advantages
from megatron_grpo.batching import BatchSchedule
from megatron_grpo.config import Config
from megatron_grpo.experience import Experience
from megatron_grpo.prompts import PromptStream, end_tokens, load_prompts
from megatron_grpo.rewards import RewardPool, total_rewards
from megatron_grpo.rollout.client import RolloutClient
from megatron_grpo.rollout.samples import Sample
from megatron_grpo.rollout.server import EngineServers
from megatron_grpo.timing import PhaseTimer


class ExperienceSource:
    """The rollout engines, the prompts and the rewards, as one thing that yields `Experience`."""

    def __init__(self, cfg: Config, shape: ModelShape) -> None:
        self.cfg = cfg
        # The engines load while the trainer builds its model.
        self.engines = EngineServers(cfg.model, cfg.rollout, cfg.train.run_dir / "logs")
        self.rewards = RewardPool(cfg.reward)
        tokenizer = AutoTokenizer.from_pretrained(cfg.model.path)
        self.client = RolloutClient(
            self.engines.base_urls, cfg.rollout.request_timeout, end_tokens(shape, tokenizer)
        )
        prompts = load_prompts(cfg, tokenizer, shape.max_position_embeddings)
        num_prompts = BatchSchedule.of(cfg.grpo).num_prompts
        self.prompts = PromptStream(prompts, num_prompts, cfg.train.seed, cfg.data.shuffle)

    def wait_ready(self) -> None:
        """Return when every engine answers; raises when one is dead or late."""
        self.engines.wait_ready(self.cfg.rollout.startup_timeout)

    def collect(self, generation: int, policy_version: int, timer: PhaseTimer) -> Experience:
        """Sample the prompts of `generation` from weights `policy_version`, and score the answers.

        The engines must serve that version; a failed engine or reward raises.
        """
        cfg = self.cfg
        with timer.phase("generate"):
            samples = self._generate(generation, policy_version)
        with timer.phase("score"):
            rewards = self.rewards.score(samples)
        totals = torch.tensor(total_rewards(rewards, cfg.reward.functions), dtype=torch.float64)
        group_ids = torch.arange(len(samples)) // cfg.grpo.num_generations
        advantages = group_advantages(totals, group_ids, cfg.grpo.scale_rewards)
        return Experience(samples, rewards, totals, group_ids, advantages)

    def update_weights(self, folder: Path, policy_version: int) -> None:
        """Have every engine load `folder` and serve it as `policy_version`."""
        with self._explained():
            self.client.update_weights(folder, policy_version)

    def _generate(self, generation: int, policy_version: int) -> list[Sample]:
        cfg = self.cfg
        with self._explained():
            return self.client.generate(
                self.prompts.batch(generation),
                num_generations=cfg.grpo.num_generations,
                temperature=cfg.rollout.temperature,
                max_completion_length=cfg.rollout.max_completion_length,
                seed=cfg.train.seed,
                step=generation,
                policy_version=policy_version,
            )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            self.engines.check()  # the log of a dead engine says more than its last answer
            raise

    def close(self) -> None:
        """End the reward workers and the engines that were started here."""
        self.rewards.close()
        self.engines.close()
