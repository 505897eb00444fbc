"""Scores complete groups while the engines work on others. Rank 0 only."""

import asyncio
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from megatron_grpo.config.config import Config
from megatron_grpo.data.samples import Sample
from megatron_grpo.rewards.by_source import RewardsBySource
from megatron_grpo.rewards.scoring import Decode, with_steps
from megatron_grpo.rollout.generation import ScoredGroup

GATHER_SECONDS = 0.01
"""Wait for groups that end in the same step of an engine, to score them together."""


class ScoreJob(NamedTuple):
    """A group that waits for its scores; lower priorities come first."""

    priority: int
    samples: Sequence[Sample]
    scored: "asyncio.Future[ScoredGroup]"


class GroupScorer:
    """Scores groups in batches: all that are complete when the last batch ends, up to a limit.
    After a failure, later groups fail with the same error."""

    def __init__(self, cfg: Config, rewards: RewardsBySource, decode: Decode) -> None:
        self._cfg, self._rewards, self._decode = cfg, rewards, decode
        rewards_of = [view.reward for view in cfg.by_source.values()]
        most = max(max(each.max_concurrent_calls, each.num_workers) for each in rewards_of)
        self._most = most if cfg.rollout.max_staleness else cfg.grpo.generation_batch_size
        """Most groups of a batch. With `max_staleness` as many as the calls that can run at a time:
        groups of an earlier generation should not wait long for a batch."""
        self._jobs: list[ScoreJob] = []
        self._failure: Exception | None = None
        self._scoring: asyncio.Task[None] | None = None

    async def score(self, samples: Sequence[Sample], priority: int) -> ScoredGroup:
        """Score the samples of a prompt, after groups of lower `priority`. A caller that is
        cancelled before withdraws its group."""
        job = ScoreJob(priority, samples, asyncio.get_running_loop().create_future())
        self._jobs.append(job)
        if self._scoring is None or self._scoring.done():
            self._scoring = asyncio.create_task(self._score_jobs())
        return await job.scored

    def score_now(self, samples: Sequence[Sample]) -> list[ScoredGroup]:
        """Score samples, ordered by prompt; blocks. Raises RewardError if too many scores fail."""
        # The limit of failures is a share of a generation: in a batch of a few groups, one failure
        # could exceed it.
        size = max(self._cfg.grpo.generation_batch_size, len(samples))
        rewards = self._rewards.score(samples, num_completions=size)
        samples = with_steps(samples, rewards, self._decode)
        totals = self._rewards.totals(samples, rewards)
        size = self._cfg.grpo.num_generations
        return [
            ScoredGroup(samples[i : i + size], rewards[i : i + size], totals[i : i + size])
            for i in range(0, len(samples), size)
        ]

    async def _score_jobs(self) -> None:
        while self._jobs:
            await asyncio.sleep(GATHER_SECONDS)
            if not (jobs := self._next_jobs()):
                continue
            samples = [sample for job in jobs for sample in job.samples]
            try:
                if self._failure:
                    raise self._failure
                groups = await asyncio.to_thread(self.score_now, samples)
                pairs = [*zip(jobs, groups, strict=True)]
            except Exception as error:  # any: callers wait for their futures
                self._failure = error
                for job in jobs:
                    if not job.scored.done():
                        job.scored.set_exception(error)
            else:
                for job, group in pairs:
                    if not job.scored.done():
                        job.scored.set_result(group)

    def _next_jobs(self) -> list[ScoreJob]:
        """Remove and return the jobs of the next batch; drops jobs with cancelled callers."""
        found: dict[int, ScoreJob] = {}
        left = []
        for job in sorted(self._jobs, key=attrgetter("priority")):
            # Two groups of one prompt, from two generations, would be scored as one.
            index = job.samples[0].prompt.index
            if index in found or len(found) == self._most:
                left.append(job)
            elif not job.scored.done():
                found[index] = job
        self._jobs = left
        return [*found.values()]
