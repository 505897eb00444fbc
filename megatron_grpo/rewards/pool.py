"""Scores completions in worker processes, with time and memory limits. A worker that fails or is
late is killed and replaced."""

import math
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from multiprocessing.connection import Pipe, wait
from threading import Lock
from typing import Any, Protocol

from megatron_grpo.bars import Show
from megatron_grpo.config.reward import RewardConfig, RewardFunction
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.samples import Sample
from megatron_grpo.rewards.functions import LOAD, Answer
from megatron_grpo.rewards.scoring import Call, RewardError, Scores, Scoring
from megatron_grpo.workers.supervised import SupervisedWorker, load_seconds
from megatron_grpo.workers.user_file import missing_column
from parallel.clock import running_time

WORKER_MODULE = "megatron_grpo.rewards.worker"
DEATH_SECONDS = 2.0
"""Time for a worker to die after its connection has closed."""
MADE_UP_COMPLETIONS = (("The answer is 42.", "stop"), ("", "length"))
"""Texts and finish reasons that `score_trial` scores, whatever the prompt."""


class RewardWorkerProcess(SupervisedWorker):
    """One process that runs the config's reward functions; it starts loading them at once."""

    def __init__(self, cfg: RewardConfig) -> None:
        super().__init__(
            WORKER_MODULE,
            memory_megabytes=cfg.memory_megabytes,
            memory_key="reward.memory_megabytes",
            send_seconds=cfg.timeout,
        )
        self.connection.send((cfg.functions, cfg.timeout))
        self.cfg = cfg
        self.deadlines = {LOAD: running_time() + load_seconds(cfg.timeout)}
        """Deadline of each open call, by number; loading is the call `LOAD`."""
        self.is_retired = False
        """Whether it gets no more calls, and is replaced once its open calls are answered."""
        self.failure = ""
        """Why it has failed; empty while it works."""

    @property
    def is_loading(self) -> bool:
        return LOAD in self.deadlines

    def send_call(self, number: int, call: tuple[Any, ...], seconds: float) -> None:
        """Send call `number`: the function's index and its columns; due within `seconds`."""
        self.deadlines[number] = running_time() + seconds
        try:
            self.connection.send((number, *call))
        except ConnectionError:
            self.failure = self.cause_of_death(DEATH_SECONDS)
        except BlockingIOError:
            self.failure = f"its process did not read the call in {self.cfg.timeout} s: killed"

    def receive_answer(self) -> tuple[int, Any] | None:
        """The number of a call and its answer; None if the worker has died (see `failure`)."""
        try:
            number, answer = self.receive_json()
        except (EOFError, ConnectionError):
            self.failure = self.cause_of_death(DEATH_SECONDS)
            return None
        del self.deadlines[number]
        return number, answer

    def finish_kill(self) -> None:
        """Also close the connection, which no other thread reads."""
        super().finish_kill()
        self.connection.close()


LOOK_SECONDS = 1.0
"""Seconds between two looks at the servers of reward models."""
CANCEL_SECONDS = 3.0
"""Seconds after `reward.timeout` within which a worker must cancel an asynchronous call."""


class ScoringCancelled(Exception):
    """`RewardPool.cancel` was called; nothing has failed."""


class ModelServers(Protocol):
    """The servers of reward models that a run starts: `engines.reward_models.RewardModels`."""

    @property
    def awaited(self) -> str:
        """Text for the first wait of `restart_dead`; empty if there is no server."""

    def addressed(self, functions: Sequence[RewardFunction]) -> tuple[RewardFunction, ...]:
        """The functions, with an address in place of the path of each model."""

    def restart_dead(self, show: Show) -> bool:
        """Start those again that have died, and return when all answer; whether any had died.
        Raises EngineError or TimeoutError if they do not."""

    def end_round(self) -> None:
        """Record that completions were scored."""

    def close(self) -> None:
        """End the servers."""


class RewardPool:
    """Processes that run the config's reward functions, one call per prompt and function.

    They start at once, load in the background, and die with this process, as do their descendants.
    The first one runs all calls of asynchronous functions, up to `reward.max_concurrent_calls` at
    once; each runs calls of ordinary functions one after the other. Reward models that the run
    serves itself are asked in `servers`.
    """

    def __init__(self, cfg: RewardConfig, servers: ModelServers | None = None) -> None:
        self.cfg = cfg
        self._servers = servers if any(each.is_served_here for each in cfg.functions) else None
        self._worker_cfg = cfg
        if self._servers:
            functions = self._servers.addressed(cfg.functions)
            self._worker_cfg = cfg.model_copy(update={"functions": functions})
        self._workers = [RewardWorkerProcess(self._worker_cfg) for _ in range(cfg.num_workers)]
        self._wanted: list[list[str]] = []
        self._accepted: list[list[str] | None] = []
        self._is_async: list[bool] = []
        self._calls: dict[int, Call] = {}
        """The calls in progress, by number."""
        self._interrupted: list[Call] = []
        """Calls that were in progress when the server of a reward model died."""
        self._numbers = count()
        self._reported: set[int] = set()
        """Functions of which a failure was printed, by index."""
        self._cancelled, self._cancel = Pipe(duplex=False)

    def wait_ready(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Wait until the functions are loaded, and check that all rows have the columns they need.

        Raises RewardError, and closes the pool, if not; EngineError or TimeoutError if the server
        of a reward model does not start.
        """
        try:
            while any(worker.is_loading for worker in self._workers):
                answers = list(self._advance())
                assert not answers, "calls run"
            for function, names in zip(self.cfg.functions, self._wanted, strict=True):
                for name in names:
                    if text := missing_column(name, rows):
                        raise RewardError(
                            f"reward function {function.label} requires {name!r}: not in its "
                            f"arguments {function.arguments}, and {text}"
                        )
        except RewardError:
            self.close()
            raise
        if self._servers:
            self._restart_dead(self._servers)

    def score_trial(self, prompt: Prompt) -> list[tuple[str, Scores]]:
        """Completions of `prompt` that show a broken function before a run, each with its scores:
        the row's `answer` if it is text, a made-up one, and an empty one that was cut off.

        Raises RewardError, and closes the pool, for what is not one score per completion; prints
        other failures, which are masked in training.
        """
        answer = prompt.row.get("answer")
        answers = [(answer, "stop")] if isinstance(answer, str) else []
        samples = [
            Sample(
                prompt=prompt,
                sample_index=index,
                completion_ids=prompt.token_ids[-1:],
                logprobs=[0.0],
                finish_reason=reason,
                text=text,
                policy_version=0,
            )
            for index, (text, reason) in enumerate([*answers, *MADE_UP_COMPLETIONS])
        ]
        scores = self.score(samples, num_completions=math.inf)
        if any(math.isnan(score) for by_function in scores for score in by_function.values()):
            print(
                "This was a trial on made-up completions of the first prompt, which does not hold "
                "up a run. If more than reward.max_failed_fraction of the model's fail, too, the "
                "run stops.",
                file=sys.stderr,
                flush=True,
            )
        return [(sample.text, score) for sample, score in zip(samples, scores, strict=True)]

    def score(self, samples: Sequence[Sample], *, num_completions: float) -> list[Scores]:
        """Scores of every sample by function label; NaN for a failed score (see `rewards`).

        Samples of one prompt must be adjacent. Raises RewardError, and closes the pool, when more
        completions than `reward.max_failed_fraction` of `num_completions` have a failed score, and
        for a call that returns anything but one score per completion. Raises ScoringCancelled once
        `cancel` was called: the pool can then only be closed. Raises what `wait_ready` raises if
        the server of a reward model dies twice; once, it is started again, its calls repeated.
        """
        assert self._workers, "the pool is closed"
        self.wait_ready([sample.prompt.row for sample in samples])
        scoring = Scoring(samples, self.cfg, self._reported, num_completions)
        calls: dict[bool, deque[Call]] = {False: deque(), True: deque()}
        for call in scoring.calls:
            calls[self._is_async[call.function]].append(call)
        try:
            while self._calls or calls[False] or calls[True]:
                self._send_calls(calls)
                for call, answer in self._advance():
                    # The failure may be the server's death and not the completion's: repeat it.
                    if self._interrupted and self._was_interrupted(call) and answer.error:
                        calls[self._is_async[call.function]].appendleft(call)
                    else:
                        scoring.record(call, answer)
                if self._servers:
                    self._restart_dead(self._servers)
        except RewardError:
            self.close()
            raise
        return scoring.scores

    def _restart_dead(self, servers: ModelServers) -> None:
        """Start dead servers of reward models again, and note which calls that has interrupted."""
        if servers.restart_dead(lambda done, total: self._check_cancelled()):
            functions = self.cfg.functions
            served = [c for c in self._calls.values() if functions[c.function].is_served_here]
            self._interrupted += served

    def _was_interrupted(self, call: Call) -> bool:
        """Whether a server has died since the call was sent; it no longer counts as interrupted."""
        # By identity: equality would compare the tokens of all samples.
        others = [each for each in self._interrupted if each is not call]
        was_interrupted = len(others) < len(self._interrupted)
        self._interrupted = others
        return was_interrupted

    def cancel(self) -> None:
        """Soon end a running `score`; safe from any thread."""
        self._cancel.send_bytes(b"!")

    def close(self) -> None:
        """Kill the workers; none of their processes is left when this returns."""
        for worker in self._workers:
            worker.begin_kill()
        for worker in self._workers:
            worker.finish_kill()
        self._workers.clear()

    def _send_calls(self, calls: Mapping[bool, deque[Call]]) -> None:
        """Send the workers as many ordinary and asynchronous calls as they can take."""
        # The worker cancels an asynchronous call by itself at the timeout. If it does not, it is
        # killed, which fails all its open calls: hence the seconds in addition.
        limits = {
            True: (self.cfg.max_concurrent_calls, self.cfg.timeout + CANCEL_SECONDS),
            False: (1, self.cfg.timeout),
        }
        for worker in self._workers:
            if worker.is_loading or worker.is_retired:
                continue
            for is_async in [True, False] if worker is self._workers[0] else [False]:
                (most, seconds), waiting = limits[is_async], calls[is_async]
                while waiting and len(worker.deadlines) < most and not worker.failure:
                    number, call = next(self._numbers), waiting.popleft()
                    self._calls[number] = call
                    columns = call.columns(self._accepted[call.function])
                    worker.send_call(number, (call.function, columns), seconds)

    def _advance(self) -> Iterator[tuple[Call, Answer]]:
        """Wait until a worker has loaded, answered, failed or is late; replace failed workers."""
        busy = [worker for worker in self._workers if worker.deadlines]
        dues = [0.0 if w.failure else min(w.deadlines.values()) for w in busy]
        seconds = max(0.0, min(dues) - running_time())
        if self._servers:
            seconds = min(seconds, LOOK_SECONDS)
        ready = wait([self._cancelled, *[worker.connection for worker in busy]], seconds)
        if self._cancelled in ready:
            self._check_cancelled()
        for worker in busy:
            if worker.connection in ready and not worker.failure:
                yield from self._read(worker)
            elif min(worker.deadlines.values()) <= running_time() and not worker.failure:
                if worker.is_loading:
                    seconds = load_seconds(self.cfg.timeout)
                    raise RewardError(
                        f"reward functions {self._names} not loaded after {seconds} s"
                    )
                worker.failure = f"no result after {self.cfg.timeout} s: killed"
            if worker.failure or (worker.is_retired and not worker.deadlines):
                for number in worker.deadlines:
                    yield self._calls.pop(number), Answer(None, worker.failure)
                worker.begin_kill()
                worker.finish_kill()
                self._workers[self._workers.index(worker)] = RewardWorkerProcess(self._worker_cfg)

    def _check_cancelled(self) -> None:
        if self._cancelled.poll():
            raise ScoringCancelled("the scoring was cancelled")

    def _read(self, worker: RewardWorkerProcess) -> Iterator[tuple[Call, Answer]]:
        """An answer, if the worker has sent one to a call."""
        was_loading, received = worker.is_loading, worker.receive_answer()
        if was_loading:
            loaded = worker.failure if received is None else received[1]
            if isinstance(loaded, str):
                raise RewardError(f"reward functions {self._names} cannot be loaded: {loaded}")
            self._wanted = [wanted for wanted, _, _ in loaded]
            self._accepted = [accepted for _, accepted, _ in loaded]
            self._is_async = [is_async for _, _, is_async in loaded]
        elif received is not None:
            number, fields = received
            answer = Answer(**fields)
            worker.is_retired |= answer.is_out_of_memory
            yield self._calls.pop(number), answer

    @property
    def _names(self) -> str:
        return ", ".join(function.name for function in self.cfg.functions)


class RewardPools:
    """One pool per distinct config, shared by training and the held-out sets scored alike.

    `servers` are those of the reward models, and end with the pools.
    """

    def __init__(self, servers: ModelServers | None = None) -> None:
        self.servers = servers
        self._pools: list[RewardPool] = []
        self.lock = Lock()
        """Held while completions are scored: pools serve one thread at a time, and an evaluation
        may begin while a generation that is made ahead is scored."""

    def pool_for(self, cfg: RewardConfig) -> RewardPool:
        """The pool of `cfg`, which starts at the first call."""
        for pool in self._pools:
            if pool.cfg == cfg:
                return pool
        self._pools.append(RewardPool(cfg, self.servers))
        return self._pools[-1]

    def cancel(self) -> None:
        for pool in self._pools:
            pool.cancel()

    def close(self) -> None:
        for pool in self._pools:
            pool.close()
        if self.servers:
            self.servers.close()
