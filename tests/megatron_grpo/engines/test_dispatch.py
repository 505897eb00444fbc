"""What the trainer knows of an engine that works on its requests, and does about it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import chain
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from helpers.mock_session import MockSession
from helpers.scripted_engines import ScriptedClient, ScriptedEngine
from megatron_grpo.engines import engine as engine_module
from megatron_grpo.engines import engine_queue as queue_module
from megatron_grpo.engines.dispatch import RequestDispatcher, level_shares
from megatron_grpo.engines.engine import Engine
from megatron_grpo.engines.engine_queue import EngineQueue
from megatron_grpo.engines.http import EngineDown

URL, PROBES = "http://engine", 0.02


def requests_of(numbers: Iterable[int]) -> dict[int, Any]:
    return {
        n: {"priority": n, "token_ids": [1], "sampling_params": {"max_tokens": 1}} for n in numbers
    }


@dataclass
class Scene:
    engine: ScriptedEngine
    queue: EngineQueue
    is_over: asyncio.Event
    taken: list[int]
    answering: asyncio.Task[None]


@asynccontextmanager
async def scene(
    numbers: range, num_per_look: int = 1000, stall: float = 60.0, **counts: int
) -> AsyncIterator[Scene]:
    """An engine that has been dealt requests of these numbers."""
    engine, taken, is_over = ScriptedEngine(num_per_look=num_per_look), [], asyncio.Event()
    engine.told(generated=100, started=50, waiting=0)

    async def take(number: int, choice: Any, url: str) -> None:
        taken.append(number)

    queue = EngineQueue(requests_of(numbers), 7, take, lambda: None)
    http = MockSession(URL, engine.respond)
    connected = Engine(URL, http, health_timeout=0.2, stall_timeout=stall)
    answering = asyncio.create_task(queue.answer(connected, is_over))
    try:
        while len(engine.asked) < len(numbers):
            await asyncio.sleep(PROBES)
        await until(lambda: queue.has_started_or_failed.is_set() or answering.done())
        engine.told(**({"generated": 110, "started": 50, "waiting": 0} | counts))
        await noted(queue)
        yield Scene(engine, queue, is_over, taken, answering)
    finally:
        is_over.set()
        engine.answers.set()
        await answering


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(PROBES)


async def noted(queue: EngineQueue) -> None:
    """Return when it knows what the engine tells now: the next note may have been asked for."""
    enough = queue._num_notes + 2
    await until(lambda: queue._num_notes >= enough)


@pytest.fixture(autouse=True)
def frequent_probes(monkeypatch):
    monkeypatch.setattr(engine_module, "PROBE_INTERVAL", PROBES)
    monkeypatch.setattr(queue_module, "POLL_INTERVAL", PROBES / 2)


def test_the_last_are_taken_back_and_then_nothing_is_known_until_the_engine_tells_it():
    async def run() -> None:
        async with scene(range(10), started=54, waiting=8) as it:  # 2 of them were preempted
            await until(lambda: it.queue.num_unstarted == 6)
            assert not it.queue.has_room
            assert [*it.queue.steal(2)] == [8, 9]
            assert it.queue.num_unstarted == 0
            it.engine.told(generated=120, started=54, waiting=4)
            await until(lambda: it.queue.num_unstarted == 4)
            it.engine.answers.set()
            await until(lambda: not it.queue.open)
            assert sorted(it.taken) == [*range(8)]

    asyncio.run(run())


def test_an_engine_with_room_is_given_requests_and_gives_none_of_them():
    async def run() -> None:
        async with scene(range(5, 8), started=53) as it:
            assert it.queue.has_room
            it.queue.enqueue(requests_of((1, 2)))
            assert not it.queue.has_room
            it.engine.told(generated=120, started=53, waiting=2)
            await noted(it.queue)
            assert it.engine.asked == [5, 6, 7, 1, 2]
            assert not it.queue.has_room and it.queue.num_unstarted == 0
            it.engine.answers.set()
            await until(lambda: sorted(it.taken) == [1, 2, 5, 6, 7])

    asyncio.run(run())


@pytest.mark.parametrize("waiting", [6, 0])
def test_counts_that_are_old_are_no_knowledge(monkeypatch, waiting):
    async def run() -> None:
        async with scene(range(10), started=54, waiting=waiting) as it:
            assert it.queue.num_unstarted == waiting and it.queue.has_room == (not waiting)
            monkeypatch.setattr(queue_module, "RECENT_SECONDS", 0.0)
            assert it.queue.num_unstarted == 0 and not it.queue.has_room

    asyncio.run(run())


@pytest.mark.parametrize("numbers", [range(2), range(0)], ids=["when it has answered", "with none"])
def test_an_engine_that_hangs_without_requests_is_noticed_before_the_others_are_done(numbers):
    async def run() -> None:
        with pytest.raises(EngineDown, match=f"^rollout engine {URL} did not answer within"):
            async with scene(numbers) as it:
                it.engine.answers.set()
                await until(lambda: sorted(it.taken) == [*numbers] and it.queue.has_room)
                it.engine.is_mute = True
                await until(it.answering.done)

    asyncio.run(run())


@pytest.mark.parametrize("route", ["/collective_rpc", "/load", "/resume"])
def test_an_engine_that_answers_probes_but_not_what_starts_it_counts_as_hung(route):
    engine = ScriptedEngine(silent_route=route)
    queue = EngineQueue(requests_of([0]), 7, None, lambda: None)

    async def run() -> None:
        http = MockSession(URL, engine.respond)
        connected = Engine(URL, http, health_timeout=0.2, stall_timeout=0.5)
        with pytest.raises(EngineDown, match=r"made no progress for 0\.5 s"):
            async with asyncio.timeout(20):
                await queue.answer(connected, asyncio.Event())

    asyncio.run(run())


def test_an_engine_at_which_requests_arrive_slowly_does_not_count_as_hung():
    async def run() -> None:
        async with scene(range(100), num_per_look=1, stall=0.5) as it:
            assert it.engine.num_accepted == 100  # which took at least a second
            it.engine.answers.set()
            await until(lambda: sorted(it.taken) == [*range(100)])

    asyncio.run(run())


def answered_in_flight(**engines: ScriptedEngine) -> list[int]:
    """Which of the requests 0 to 11 are answered, while several generations are in flight."""
    taken = []

    async def take(number: int, choice: Any, url: str) -> None:
        taken.append(number)

    async def run() -> None:
        client = ScriptedClient(**engines)
        requests = SimpleNamespace(
            open=requests_of(range(12)), policy_version=7, take_answer=take, are_movable=True
        )
        dispatcher = RequestDispatcher(client.pool, client.connect, requests, stays=True)
        running = asyncio.create_task(dispatcher.run())
        async with asyncio.timeout(10):
            while len(taken) < 12 and not running.done():
                await asyncio.sleep(PROBES)
            dispatcher.cut()
            await running

    asyncio.run(run())
    return sorted(taken)


@pytest.mark.parametrize(
    ("route", "fault"),
    [
        ("/collective_rpc", aiohttp.ClientConnectionError),
        ("/pause", aiohttp.ClientConnectionError),
        ("/pause", aiohttp.SocketTimeoutError),  # it is healthy, but late with an answer
    ],
)
def test_an_engine_that_starts_late_takes_over_what_one_that_is_lost_at_once_leaves(route, fault):
    lost = ScriptedEngine(broken_route=route, fault=fault)
    late = ScriptedEngine(delays={route: 0.1})
    late.answers.set()
    assert answered_in_flight(lost=lost, late=late) == [*range(12)]


def test_engines_that_are_lost_together_leave_their_requests_to_the_one_that_is_well():
    dying = ScriptedEngine(
        broken_route="/inference/v1/generate", delays={"/resume": 0.4}, num_per_look=0
    )
    dead = ScriptedEngine(
        broken_route="/inference/v1/generate", delays={"/inference/v1/generate": 0.15}
    )
    well = ScriptedEngine()
    well.answers.set()
    assert answered_in_flight(dying=dying, dead=dead, well=well) == [*range(12)]


@pytest.mark.parametrize(
    ("num_items", "loads", "sizes"),
    [(5, [3, 0], [1, 4]), (5, [0, 9, 1], [3, 0, 2]), (7, [0, 0, 0], [3, 2, 2]), (0, [1], [0])],
)
def test_engines_that_have_less_left_get_more(num_items, loads, sizes):
    shares = level_shares([*range(num_items)], loads)
    assert [len(share) for share in shares] == sizes
    assert [*chain(*shares)] == [*range(num_items)]  # a group of completions stays together


def test_a_group_goes_to_one_engine_and_a_turn_to_the_one_that_had_the_turn_before():
    client = ScriptedClient(a=ScriptedEngine(), b=ScriptedEngine())
    first = SimpleNamespace(
        open=requests_of(range(3)), policy_version=7, take_answer=None, are_movable=True
    )
    dispatcher = RequestDispatcher(client.pool, client.connect, first, stays=True)
    dispatcher.add(requests_of(range(3, 7)), together=True)
    dispatcher.follow_up(7, *requests_of([7]).values(), "http://a")
    held = [sorted(queue.open) for queue in dispatcher._queues.values()]
    assert held == [[0, 1, 7], [2, 3, 4, 5, 6]]
