"""Rank 0's event loop: everything that waits for engines, agents and rewards runs in its thread.

The training thread runs coroutines by `call` and waits. Coroutines never block the loop: long work
goes to `asyncio.to_thread`. State that only coroutines touch needs no lock.
"""

import asyncio
from collections.abc import Callable, Coroutine
from threading import Thread
from typing import Any

from parallel.clock import RunningLoop


class EventLoop:
    """A loop in a thread of its own, from the constructor until `close`."""

    def __init__(self) -> None:
        self._loop = RunningLoop()
        self._thread = Thread(target=self._loop.run_forever, name="event loop", daemon=True)
        self._thread.start()

    def call[T](self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run `coroutine`, and return its result or raise its error; not in the loop's own thread.

        Example: `loop.call(router.resume(3))`
        """
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def close(self) -> None:
        """Cancel all tasks, and end the thread when they have ended."""
        self.call(self._cancel_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    async def _cancel_tasks(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Notice:
    """Wakes coroutines that wait for a change of state in the loop."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    def give(self) -> None:
        """Have all waiting coroutines check again."""
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():  # its coroutine may have been cancelled
                future.set_result(None)

    async def until(self, is_reached: Callable[[], object]) -> None:
        """Return when `is_reached()`, checked now and after each notice."""
        while not is_reached():
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            await future
