"""Simulates training whose engines generate ahead: seconds of a step, idle time, staleness.

Events: a completion ends, a generation is taken for training, a push. Between two events each pass
adds a token to every running completion, and takes `pass_seconds(running)`. So a completion of any
length costs two operations on a heap.

Left out: requests that move from one engine to another, and rewards.
"""

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush


@dataclass(frozen=True, kw_only=True)
class Mode:
    """How far engines generate ahead: `max_staleness` and `in_flight_updates` of `rollout`."""

    max_staleness: int
    in_flight: bool

    def __str__(self) -> str:
        return f"{self.max_staleness}, in flight" if self.in_flight else str(self.max_staleness)


ENOUGH = 8192
"""Completions over which means are taken, in 4 to 64 generations."""

MODES = (
    Mode(max_staleness=0, in_flight=False),
    Mode(max_staleness=1, in_flight=False),
    *(Mode(max_staleness=number, in_flight=True) for number in (1, 2, 4, 8)),
)


@dataclass(frozen=True, kw_only=True)
class Loop:
    """Engines and a trainer; seconds of the trainer are those for one generation."""

    lengths: Sequence[int]
    """Tokens of completions; each generation draws its lengths from them."""
    batch: int
    """Completions of a generation."""
    num_engines: int
    at_once: int
    """Completions that an engine runs at once; others wait."""
    pass_seconds: Callable[[int], float]
    """Seconds of a forward pass, by the number of running completions."""
    slowdown: float = 1.0
    """Time of a pass while ranks train, relative to while they wait: 1 where they share neither
    caches nor memory. Prompts are not slowed."""
    prompt_seconds: float
    """Seconds of a prompt, per completion."""
    token_seconds: float
    """Seconds to recompute one token after a push."""
    recomputes: bool = True
    """Whether a push makes engines recompute prompts and sampled tokens."""
    start_seconds: float
    """Seconds until an idle engine has its requests and computes."""
    receive_seconds: float = 0.0
    """Seconds per request that a busy engine takes, instead of computing."""
    train_seconds: float
    push_seconds: float
    requests_seconds: float = 0.0
    """Seconds that rank 0 takes from training to request a generation.

    With `max_staleness` 0 it does so while it waits anyway.
    """


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Means over generations, once the queue is full."""

    seconds: float
    """Seconds of a generation, from the start of its training to the next one's."""
    tokens_per_second: float
    """Rate of completions."""
    engines_busy: float
    """Share of the time in which an engine computes."""
    trainer_busy: float
    """Share of the time in which the ranks train; pushes are not counted."""
    staleness_mean: float
    """Generations trained between the weights that sampled a token and its own training."""
    staleness_max: int


class Engine:
    """Completions of one engine, started in the order of their requests."""

    def __init__(self, loop: Loop) -> None:
        self.clock = 0.0
        """Simulated time that the engine has reached."""
        self.busy = 0.0
        self.left: Counter[int] = Counter()
        """Unfinished completions, by generation."""
        self.staleness: defaultdict[int, float] = defaultdict(float)
        """Sum of the staleness of a generation's tokens."""
        self.max_staleness: Counter[int] = Counter()
        # Cached: called at every event, with few different numbers.
        self._loop, self._pass_seconds = loop, cache(loop.pass_seconds)
        self._version, self._slowdown = 0, 1.0
        self._ended: dict[int, float] = {}
        self._passes = self._pushed_at = 0.0
        """Passes so far, and at the latest push."""
        self._running: list[tuple[float, int, int]] = []
        """Heap of (`_passes` at the completion's end, generation, tokens)."""
        self._waiting: deque[tuple[int, int]] = deque()

    def request(self, now: float, generation: int, lengths: Sequence[int]) -> None:
        """Queue completions of a generation, which is later than all queued ones."""
        if self._running:
            self._work(len(lengths) * self._loop.receive_seconds)
        else:
            self.clock = max(self.clock, now) + self._loop.start_seconds
        self.left[generation] = len(lengths)
        self._waiting.extend((generation, length) for length in lengths)
        self._start()

    def run(self, until: float, *, trains: bool = False) -> None:
        """Generate until a time, while ranks train (`trains`) or wait."""
        self._slowdown = self._loop.slowdown if trains else 1.0
        while self._running and (end := self._next_end()) <= until:
            self._end_one(end)
        if self._running and self.clock < until:
            self._passes += (until - self.clock) / self._seconds()
            self._work(until - self.clock)
        self._slowdown = 1.0  # `finish` and `push` run while ranks wait

    def finish(self, generation: int) -> float:
        """Generate until a generation is complete; return when that is, or was."""
        while self.left[generation]:
            self._end_one(self._next_end())
        return self._ended.get(generation, 0.0)

    def push(self, now: float, version: int) -> None:
        """Take new weights; recompute running completions if the loop `recomputes`."""
        for end, generation, length in self._running:
            self._count(end, generation, length)
        again = sum(self._passes - end + length for end, _, length in self._running)
        self._version, self._pushed_at = version, self._passes
        self.clock = max(self.clock, now) + self._loop.push_seconds
        if self._running and self._loop.recomputes:
            prompts = len(self._running) * self._loop.prompt_seconds
            self._work(again * self._loop.token_seconds + prompts)

    def _next_end(self) -> float:
        passes = self._running[0][0] - self._passes
        return self.clock + passes * self._seconds()

    def _seconds(self) -> float:
        """Seconds of a pass with the running completions."""
        return self._slowdown * self._pass_seconds(len(self._running))

    def _end_one(self, now: float) -> None:
        self._work(now - self.clock)
        end, generation, length = heappop(self._running)
        self._passes = end
        self._count(end, generation, length)
        self.left[generation] -= 1
        self._ended[generation] = self.clock
        self._start()

    def _start(self) -> None:
        while self._waiting and len(self._running) < self._loop.at_once:
            generation, length = self._waiting.popleft()
            heappush(self._running, (self._passes + length, generation, length))
            self._work(self._loop.prompt_seconds)

    def _work(self, seconds: float) -> None:
        self.clock += seconds
        self.busy += seconds

    def _count(self, end: float, generation: int, length: int) -> None:
        """Add the staleness of the tokens that a completion sampled since the latest push."""
        sampled = self._passes - max(end - length, self._pushed_at)
        if sampled > 0:
            staleness = generation - self._version
            self.staleness[generation] += sampled * staleness
            self.max_staleness[generation] = max(self.max_staleness[generation], staleness)


def simulate(loop: Loop, mode: Mode, num_generations: int | None = None) -> Forecast:
    """Means over `num_generations`, or over enough, after the first ones; deterministic.

    Events have the order of `rollout.schedule.RolloutScheduler`.
    """
    first = mode.max_staleness + 2  # earlier ones fill the queue and are not measured
    count = num_generations or max(4, min(64, ENOUGH // loop.batch))
    engines = [Engine(loop) for _ in range(loop.num_engines)]
    now = began = busy = 0.0
    requested = 0
    train_seconds = loop.train_seconds + (loop.requests_seconds if mode.max_staleness else 0.0)
    for generation in range(first + count):
        if generation == first:
            began, busy = now, sum(engine.busy for engine in engines)
        in_flight = generation + mode.max_staleness * mode.in_flight
        requested = _request(loop, engines, now, range(requested, in_flight + 1))
        now = _finished(engines, generation, now)
        requested = _request(
            loop, engines, now, range(requested, generation + mode.max_staleness + 1)
        )
        now += train_seconds
        for engine in engines:
            engine.run(now, trains=True)
        if not mode.in_flight:
            now = _finished(engines, requested - 1, now)
        for engine in engines:
            engine.push(now, generation + 1)
        now += loop.push_seconds
    took, measured = now - began, range(first, first + count)
    tokens = sum(sum(drawn(loop, generation)) for generation in measured)
    return Forecast(
        seconds=took / count,
        tokens_per_second=tokens / took,
        engines_busy=(sum(engine.busy for engine in engines) - busy) / took / loop.num_engines,
        trainer_busy=train_seconds * count / took,
        staleness_mean=sum(each.staleness[i] for each in engines for i in measured) / tokens,
        staleness_max=max(each.max_staleness[i] for each in engines for i in measured),
    )


def drawn(loop: Loop, generation: int) -> list[int]:
    """Tokens of each completion of a generation, equal in all modes."""
    return random.Random(generation).choices(loop.lengths, k=loop.batch)


def _request(loop: Loop, engines: Sequence[Engine], now: float, generations: range) -> int:
    """Divide generations evenly among the engines; return the next one to request."""
    for generation in generations:
        lengths = drawn(loop, generation)
        for number, engine in enumerate(engines):
            engine.request(now, generation, lengths[number :: len(engines)])
    return max(generations.start, generations.stop)


def _finished(engines: Sequence[Engine], generation: int, now: float) -> float:
    """Time, not before `now`, at which all engines have finished a generation."""
    now = max(now, *(engine.finish(generation) for engine in engines))
    for engine in engines:
        engine.run(now)
    return now
