"""Structured concurrency: coroutines that run at the same time and end together."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")


async def together(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all; the first failure cancels the others, and is raised when they have ended."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


@asynccontextmanager
async def beside(watcher: Coroutine[Any, Any, NoReturn]) -> AsyncIterator[None]:
    """Run `watcher` concurrently with the block; what it raises ends the block."""
    try:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(watcher)
            yield
            task.cancel()
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
