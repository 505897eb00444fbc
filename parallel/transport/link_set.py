"""All links of a process: opened together, used together, and all closed when one fails."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from functools import partial
from typing import TypeVar

from parallel.transport.links import Link
from parallel.transport.wire import LinkError

L = TypeVar("L", bound=Link)
T = TypeVar("T")


def opened(calls: Sequence[Callable[[], L]]) -> list[L]:
    """The links that these calls open, all at the same time.

    When one fails, the links that were opened are closed.
    """
    made: list[Link] = []

    def noted(call: Callable[[], L]) -> L:
        link = call()
        made.append(link)
        return link

    try:
        return at_once([partial(noted, call) for call in calls], abort=lambda: None)
    except BaseException:
        with suppress(Exception):  # the first failure says more
            _close_all(made)
        raise


class LinkSet:
    """The open links of a process."""

    def __init__(self, links: Sequence[Link]) -> None:
        self._links = links
        self._is_closed = False

    def run(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """Run each of `jobs` in its own thread; returns their results.

        When one fails, aborts the others, closes all links, and raises the first error.
        """
        if self._is_closed:
            raise LinkError("the links were closed, by a failure or by this process")
        try:
            return at_once(jobs, self._abort)
        except BaseException:
            with suppress(Exception):  # the first failure says more
                self.close()
            raise

    def close(self) -> None:
        """Close all links, even if closing one fails; call it while no job is running."""
        if not self._is_closed:
            self._is_closed = True
            _close_all(self._links)

    def _abort(self) -> None:
        for link in self._links:
            link.abort()


def _close_all(links: Sequence[Link]) -> None:
    with ExitStack() as stack:
        for link in reversed(links):
            stack.callback(link.close)


def at_once(jobs: Sequence[Callable[[], T]], abort: Callable[[], None]) -> list[T]:
    """Run each of `jobs` in its own thread; returns their results.

    When one fails, calls `abort`, which must end the others, and raises the first error when all
    have ended.
    """
    failures: list[BaseException] = []

    def run(job: Callable[[], T]) -> T:
        try:
            return job()
        except BaseException as error:
            failures.append(error)
            abort()
            raise

    if not jobs:
        return []
    with ThreadPoolExecutor(max_workers=len(jobs)) as pool:
        futures = [pool.submit(run, job) for job in jobs]
        try:
            wait(futures)
        except BaseException:  # such as the user's interrupt
            abort()
            raise
    if failures:
        first = failures[0]
        # The traceback of an error references the links' buffers. Do not keep a reference cycle to
        # it here, or they would stay allocated until the next garbage collection.
        failures.clear()
        futures.clear()
        try:
            raise first
        finally:
            del first
    return [future.result() for future in futures]
