"""Structured concurrency: coroutines that run and end together; futures."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any, NoReturn


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """A TaskGroup that raises its first failure instead of a group of failures."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


async def gather_all[T](coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all coroutines; the first failure cancels the others, and is raised after their end."""
    async with task_group() as group:
        tasks = [group.create_task(coroutine) for coroutine in coroutines]
    return [task.result() for task in tasks]


@asynccontextmanager
async def run_with(watcher: Coroutine[Any, Any, NoReturn]) -> AsyncIterator[None]:
    """Run `watcher` concurrently with the block; an error of `watcher` ends the block."""
    async with task_group() as group:
        task = group.create_task(watcher)
        yield
        task.cancel()


def lasting_future() -> Future[Any]:
    """A future that cannot be cancelled: a waiter's timeout leaves it to others and retries."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future
