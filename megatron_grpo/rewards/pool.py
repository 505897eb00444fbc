"""Scores completions in worker processes with time and memory limits. Workers that fail or are late
are killed and replaced."""

import math
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from multiprocessing.connection import Pipe, wait
from threading import Lock
from typing import Any, NamedTuple, Protocol

from megatron_grpo.bars import Show
from megatron_grpo.config.reward import RewardConfig, RewardFunction
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.samples import Sample, made_up
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


class Trial(NamedTuple):
    """A completion that no model made, with its scores."""

    text: str
    scores: Scores
    is_answer: bool
    """Whether it is the row's own answer."""


class RewardWorkerProcess(SupervisedWorker):
    """Process that runs the config's reward functions; loading begins in the constructor."""

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
        """Deadline of each open call by number; loading is the call `LOAD`."""
        self.is_retired = False
        """Whether the worker gets no more calls, and is replaced once its open calls have ended."""
        self.failure = ""
        """Reason of the worker's failure; empty while it works."""

    @property
    def is_loading(self) -> bool:
        return LOAD in self.deadlines

    def send_call(self, number: int, call: tuple[Any, ...], seconds: float) -> None:
        """Send call `number`, (index of the function, columns), with a deadline in `seconds`."""
        self.deadlines[number] = running_time() + seconds
        try:
            self.connection.send((number, *call))
        except ConnectionError:
            self.failure = self.cause_of_death(DEATH_SECONDS)
        except BlockingIOError:
            self.failure = f"its process did not read the call in {self.cfg.timeout} s: killed"

    def receive_answer(self) -> tuple[int, Any] | None:
        """Number of a call and its answer; None if the worker has died, with `failure` set."""
        try:
            number, answer = self.receive_json()
        except (EOFError, ConnectionError):
            self.failure = self.cause_of_death(DEATH_SECONDS)
            return None
        del self.deadlines[number]
        return number, answer

    def finish_kill(self) -> None:
        """Wait until all processes have ended, and close the connection."""
        super().finish_kill()
        self.connection.close()


LOOK_SECONDS = 1.0
"""Seconds between two checks of the servers of reward models."""
CANCEL_SECONDS = 3.0
"""Time for a worker to cancel an asynchronous call that has reached `reward.timeout`."""


class ScoringCancelled(Exception):
    """`RewardPool.cancel` was called; no function has failed."""


class ModelServers(Protocol):
    """Servers of reward models that the run starts: `engines.reward_models.RewardModels`."""

    @property
    def awaited(self) -> str:
        """Text for the progress of the first `restart_dead`; empty without servers."""

    def addressed(self, functions: Sequence[RewardFunction]) -> tuple[RewardFunction, ...]:
        """Replace the path of each served model by the server's address."""

    def restart_dead(self, show: Show) -> bool:
        """Wake the servers, restart dead ones, and wait until all answer; returns whether any had
        died. Raises EngineError or TimeoutError if a server does not answer."""

    def end_round(self) -> None:
        """Mark the end of a round of scoring; servers that share GPUs may sleep."""

    def close(self) -> None:
        """End the servers."""


class RewardPool:
    """Worker processes for the config's reward functions, with one call per prompt and function.

    Workers load the functions in the background, and die with this process and their descendants.
    The first worker runs all calls of asynchronous functions, up to `reward.max_concurrent_calls`
    at a time; every worker runs calls of ordinary functions, one after the other. `servers` are
    the reward models that the run serves itself.
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
        """Calls in progress by number."""
        self._interrupted: list[Call] = []
        """Calls that were in progress when the server of a reward model died."""
        self._numbers = count()
        self._reported: set[int] = set()
        """Indices of functions with a printed failure: only the first one is shown."""
        # A pipe, since `multiprocessing.connection.wait` cannot wait for a threading.Event.
        self._cancelled, self._cancel = Pipe(duplex=False)

    def wait_ready(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Wait until the functions are loaded, and check that `rows` have their columns.

        Raises RewardError, and closes the pool, if functions cannot be loaded or columns are
        missing; EngineError or TimeoutError if the server of a reward model does not start.
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

    def score_trial(self, prompt: Prompt) -> list[Trial]:
        """Score completions of `prompt` that show a broken function before a run: the row's
        `answer` if it is text, a made-up one, and an empty one that was cut off.

        Raises RewardError, and closes the pool, if a result is not one score per completion; prints
        other failures, which training masks.
        """
        answer = prompt.row.get("answer")
        answers = [(answer, "stop")] if isinstance(answer, str) else []
        samples = [
            made_up(prompt, index, text, reason)
            for index, (text, reason) in enumerate([*answers, *MADE_UP_COMPLETIONS])
        ]
        scores = self.score(samples, num_completions=math.inf)
        if any(math.isnan(score) for by_function in scores for score in by_function.values()):
            print(
                "This was a trial with made-up completions of the first prompt. The run goes on, "
                "and stops if more than reward.max_failed_fraction of its completions fail.",
                file=sys.stderr,
                flush=True,
            )
        return [
            Trial(sample.text, score, is_answer=sample.sample_index < len(answers))
            for sample, score in zip(samples, scores, strict=True)
        ]

    def score(self, samples: Sequence[Sample], *, num_completions: float) -> list[Scores]:
        """Scores of every sample by function label; NaN for a failed score (see `rewards`).

        Samples of one prompt must be adjacent. Raises RewardError, and closes the pool, when more
        completions than `reward.max_failed_fraction` of `num_completions` have a failed score, or a
        call does not return one score per completion. Raises ScoringCancelled after `cancel`: the
        pool can then only be closed. If the server of a reward model dies, it is restarted once and
        its calls are repeated; a second death raises what `wait_ready` raises.
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
                    # The server's death may have caused the failure: repeat the call.
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
        """Restart dead servers of reward models, and note the calls that were interrupted."""
        if servers.restart_dead(lambda done, total: self._check_cancelled()):
            functions = self.cfg.functions
            served = [c for c in self._calls.values() if functions[c.function].is_served_here]
            self._interrupted += served

    def _was_interrupted(self, call: Call) -> bool:
        """Whether a server has died since the call was sent; forgets the interruption."""
        # By identity: equality would compare the tokens of all samples.
        others = [each for each in self._interrupted if each is not call]
        was_interrupted = len(others) < len(self._interrupted)
        self._interrupted = others
        return was_interrupted

    def cancel(self) -> None:
        """End a running `score` soon, with ScoringCancelled; safe from any thread."""
        self._cancel.send_bytes(b"!")

    def close(self) -> None:
        """Kill the workers; none of their processes is left on return."""
        # All at the same time: a supervisor may take seconds to kill its descendants.
        for worker in self._workers:
            worker.begin_kill()
        for worker in self._workers:
            worker.finish_kill()
        self._workers.clear()

    def _send_calls(self, calls: Mapping[bool, deque[Call]]) -> None:
        """Send waiting calls (by whether they are asynchronous) to workers with room."""
        # The worker cancels an asynchronous call by itself at the timeout. A worker that does not
        # is killed, which fails all its open calls: hence CANCEL_SECONDS more.
        limits = {
            True: (self.cfg.max_concurrent_calls, self.cfg.timeout + CANCEL_SECONDS),
            False: (1, self.cfg.timeout),
        }
        for worker in self._workers:
            if worker.is_loading or worker.is_retired:
                continue
            # Asynchronous calls first: then the worker never has calls of both kinds, since an
            # ordinary one is sent only when no call is open.
            for is_async in [True, False] if worker is self._workers[0] else [False]:
                (most, seconds), waiting = limits[is_async], calls[is_async]
                while waiting and len(worker.deadlines) < most and not worker.failure:
                    number, call = next(self._numbers), waiting.popleft()
                    self._calls[number] = call
                    columns = call.columns(self._accepted[call.function])
                    worker.send_call(number, (call.function, columns), seconds)

    def _advance(self) -> Iterator[tuple[Call, Answer]]:
        """Wait until a worker has loaded, answered, failed or is late; yields answers, and replaces
        failed workers."""
        busy = [worker for worker in self._workers if worker.deadlines]
        # 0.0: a worker that failed in `send_call` is replaced without a wait.
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
        """Read a message of a worker; yields the answer if it belongs to a call."""
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
    """One pool per distinct config; training and held-out sets with equal rewards share one.
    `servers` of reward models end with the pools."""

    def __init__(self, servers: ModelServers | None = None) -> None:
        self.servers = servers
        self._pools: list[RewardPool] = []
        self.lock = Lock()
        """Held during scoring: pools serve one thread at a time, and an evaluation may begin while
        a generation that is made ahead is scored."""

    def pool_for(self, cfg: RewardConfig) -> RewardPool:
        """Pool of `cfg`; the first call starts it."""
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
