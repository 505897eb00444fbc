"""A run that is killed with updates in flight and resumed equals the undisturbed run, to the bit,
if engines answer the same.

Where a real engine pauses depends on time; here a test decides. There are no ranks: the weights
after a step are a digest of the weights before it and of all that it trains on, and tokens and
log-probabilities are functions of weights, seed and position. So one bit that differs changes all
tokens after it.
"""

import asyncio
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from helpers.engines.live import wait_until
from helpers.engines.scripted import ScriptedEngine, scripted_services, use
from helpers.models.tiny import tiny_model
from megatron_grpo.batch.experience import Experience
from megatron_grpo.checkpoints.experience_file import (
    OPEN,
    read_experience,
    ready_prefix,
    write_experience,
)
from megatron_grpo.checkpoints.trainer_state import (
    Ready,
    Record,
    TrainerState,
    read_record,
    write_record,
)
from megatron_grpo.engines.choice import CUT
from megatron_grpo.rollout import schedule
from megatron_grpo.rollout.generation import RolloutBatch, ScoredGroup
from megatron_grpo.rollout.runner import PRIORITIES, GenerationRunner
from megatron_grpo.rollout.schedule import RolloutScheduler
from megatron_grpo.rollout.services import RolloutServices
from megatron_grpo.timing import PhaseTimer
from parallel import ParallelDims

TIMER = PhaseTimer(lambda phase: None)
NUM_STEPS, MAX_STALENESS, LENGTH, NUM_PER_PUSH = 8, 2, 24, 4
"""Steps of a run, one per generation; staleness; most tokens of a completion, and per push."""
SAVE_INTERVAL = 2


@dataclass
class SteadyEngine(ScriptedEngine):
    """Samples all tokens that a completion may have by now, with random delays."""

    weights: dict[int, bytes] = field(default_factory=dict)
    """Bytes that key the samples, by version."""
    trained: int = 0
    """The generation in training. Completions of later ones get at most NUM_PER_PUSH tokens for
    each push that they go through."""
    lengths: dict[int, int] = field(default_factory=dict)
    """Tokens so far of the completions in progress, by number of the request."""

    def may_sample(self, number: int) -> bool:
        ahead = number // PRIORITIES - self.trained
        most = math.inf if ahead <= 0 else NUM_PER_PUSH * (MAX_STALENESS + 1 - ahead)
        return self.lengths[number] < most

    async def respond(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/load":
            return httpx.Response(200, json={"server_load": len(self.lengths)})
        return await super().respond(request)

    async def _complete(self, request):
        number, params = request["priority"], request["sampling_params"]
        num_left, num_cuts, reason = params["max_tokens"], self.num_cuts, ""
        self.lengths[number] = LENGTH - num_left
        tokens: list[tuple[int, float, int]] = []
        while not reason:
            await asyncio.sleep(random.random() * 0.002)
            if num_cuts < self.num_cuts:
                reason = "abort"
            elif not self.is_paused and self.may_sample(number):
                what = f"{params['seed']} {request['token_ids']} {len(tokens)}".encode()
                token, logprob = blake2b(what, key=self.weights[self.version]).digest()[:2]
                tokens.append((token, -logprob / 100, self.version))
                self.lengths[number] += 1
                is_end = token < 12
                reason = "stop" if is_end else "length" if len(tokens) == num_left else ""
        del self.lengths[number]
        spans, start = [], 0
        for version, of_version in groupby(version for _, _, version in tokens):
            end = start + len([*of_version])
            spans.append({"version": str(version), "start": start, "end": end})
            start = end
        choice = {
            "routed_experts": None,
            "weight_versions": spans,
            "finish_reason": reason,
            "text": "",
            "token_ids": [token for token, _, _ in tokens],
            "logprobs": {"content": [{"logprob": logprob} for _, logprob, _ in tokens]},
        }
        return httpx.Response(200, json={"choices": [choice]})


def score(samples) -> list[ScoredGroup]:
    groups = [samples[i : i + 4] for i in range(0, len(samples), 4)]
    totals = [[sum(sample.completion_ids) % 7 / 7 for sample in group] for group in groups]
    return [
        ScoredGroup(group, [{"share_of_digits": total} for total in each], each)
        for group, each in zip(groups, totals, strict=True)
    ]


class Process:
    """Rank 0 from a start to a kill."""

    def __init__(self, services: RolloutServices, folder: Path) -> None:
        self.services, self.folder = services, folder
        self.engine = SteadyEngine(version=0)
        use(services, self.engine)
        timeline = SimpleNamespace(add_rollout=lambda *args, **about: None)
        watchdog = SimpleNamespace(is_preempted=False)
        self.runner = GenerationRunner(services, watchdog, timeline, TrainerState(step=0))
        self.scheduler = RolloutScheduler(services.cfg, self.runner, lambda step: None)
        self.step, self.weights = 0, b"pretrained"
        self.batches: dict[int, RolloutBatch] = {}
        """Batches that were trained on, by generation."""
        if saved := [int(each.name) for each in folder.iterdir()]:
            self._load(max(saved))
        self.engine.version, self.engine.weights[self.step] = self.step, self.weights
        self.scheduler.after_push(self.step)

    def train(self, num_steps: int) -> None:
        """Train like `Trainer` until so many steps are done, then be killed."""
        scheduler, engine = self.scheduler, self.engine
        while self.step < num_steps:
            engine.trained = self.step
            scheduler.await_generation(self.step, self.step, TIMER)
            batch = self.batches[self.step] = scheduler.ready.pop(self.step)
            scheduler.request_ahead(self.step)
            self._learn(batch.experience)
            assert wait_until(lambda: self.is_at_push, seconds=30)
            scheduler.before_push(self.step, TIMER)
            engine.version, engine.weights[self.step] = self.step, self.weights
            scheduler.after_push(self.step)
            scheduler.request_ahead(self.step)
            if self.step % SAVE_INTERVAL == 0:
                self._save()
        self.services.cancel()
        self.runner.close()

    @property
    def is_at_push(self) -> bool:
        """Whether the engine has sampled all tokens that it may."""
        numbers = {
            request.priority
            for attempt in [*self.runner._attempts.values()]
            if not attempt.scored
            for request in [*attempt.group._requests.values()]
        }
        begun = {key.generation for key in [*self.runner._attempts]}
        if not begun >= self.scheduler.pending.keys():
            return False
        at_engine = self.engine.lengths.copy()
        return numbers == at_engine.keys() and not any(map(self.engine.may_sample, at_engine))

    def _learn(self, experience: Experience) -> None:
        found = blake2b(self.weights)
        for sample in experience.samples:
            found.update(repr(row_of(sample)).encode())
        found.update(experience.totals.numpy().tobytes() + experience.advantages.numpy().tobytes())
        self.step, self.weights = self.step + 1, found.digest()

    def _save(self) -> None:
        """Save like `Trainer._checkpoint`."""
        groups, samples, done = self.runner.open_groups()
        ready = sorted((self.scheduler.ready | done).items())
        (folder := self.folder / str(self.step)).mkdir()
        each = tuple(Ready(generation=number, metrics={}) for number, _ in ready)
        state = TrainerState(step=self.step, groups=groups, ready=each)
        write_record(folder, Record(state=state, layout=ParallelDims(), counters={}, cursor={}))
        (folder / "weights").write_bytes(self.weights)
        for number, (_, batch) in enumerate(ready):
            write_experience(folder, batch.experience, ready_prefix(number))
        if samples:
            write_experience(folder, samples, OPEN)

    def _load(self, step: int) -> None:
        folder, prompts = self.folder / str(step), self.services.stream.prompts
        state, self.weights = read_record(folder, step).state, (folder / "weights").read_bytes()
        self.step = self.engine.trained = step
        if samples := read_experience(folder, prompts, OPEN):
            self.runner.restore(state.groups, samples)
        for number, ready in enumerate(state.ready):
            experience = read_experience(folder, prompts, ready_prefix(number))
            self.scheduler.ready[ready.generation] = RolloutBatch(experience, ready.metrics)


def row_of(sample) -> tuple:
    tokens = [*sample.completion_ids], [*sample.logprobs]
    return sample.prompt.index, sample.sample_index, sample.finish_reason, sample.spans, *tokens


@pytest.fixture
def services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RolloutServices]:
    monkeypatch.setattr(schedule, "on_rank_0", lambda runner, ask, errors: ask(runner))
    options = (
        f"rollout.max_completion_length={LENGTH}",
        f"rollout.max_staleness={MAX_STALENESS}",
        "grpo.steps_per_generation=1",
    )
    model = tiny_model(tmp_path / "model", "qwen3")
    with scripted_services(model, tmp_path, *options) as services:
        services.scorer.score_now = score
        yield services


def test_a_killed_run_equals_the_undisturbed_one(services, tmp_path):
    """Kills before the first checkpoint, after it, one step after another, and right at one."""
    (folder := tmp_path / "whole").mkdir()
    whole = Process(services, folder)
    whole.train(NUM_STEPS)
    samples = [sample for batch in whole.batches.values() for sample in batch.experience.samples]
    assert {len(sample.spans) for sample in samples} == {1, 2, 3}
    saved = read_experience(folder / "4", services.stream.prompts, OPEN).samples
    assert {CUT, "stop"} == {sample.finish_reason for sample in saved}

    (folder := tmp_path / "killed").mkdir()
    for first_step, num_steps in ((0, 1), (0, 3), (2, 5), (4, 6), (6, NUM_STEPS)):
        resumed = Process(services, folder)
        assert resumed.step == first_step
        resumed.train(num_steps)
        for generation, batch in resumed.batches.items():
            expected = whole.batches[generation].experience.samples
            assert [*map(row_of, batch.experience.samples)] == [*map(row_of, expected)]
    assert resumed.weights == whole.weights
