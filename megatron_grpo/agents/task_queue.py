"""Tasks that agents outside of the run take over HTTP: `agent.listen`.

    POST /tasks        {"key", "url", "row", "messages"} of a sample; 204 if none waits
    POST /tasks/KEY    outcome: {"reward": 0.5, "metrics": {"files": 3}}, or {"error": "why"}

Both require the run's token (`Authorization: Bearer`); each start writes a new one, with the
address, to `agents.json` of the run directory. `url` and `key` are for the endpoint's routes.
"""

import asyncio
import hmac
import json
import os
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from aiohttp import web

from megatron_grpo.agents.actors import checked
from megatron_grpo.agents.fork_pool import InstanceFailed, InstancesLost
from megatron_grpo.launch.run_dir import bearer, new_token
from megatron_grpo.unicode import as_unicode
from megatron_grpo.workers.tasks import lasting_future
from parallel.clock import running_time

FILE = "agents.json"
WAIT_SECONDS = 30.0
"""Longest wait of a request for a task; then the answer is 204."""
POLL_SECONDS, WATCH_SECONDS = 0.05, 0.5


class ExternalTask:
    """A sample that waits for an agent, or has one; in place of `fork_pool.Instance`."""

    def __init__(self, queue: "TaskQueue") -> None:
        self._queue = queue
        self.columns: Mapping[str, Any] = {}
        self.done: Future[dict[str, Any]] = lasting_future()
        """Outcome of the episode: reward and metrics (`actors.checked`)."""
        self.deadline = 0.0

    def begin(self, prompt: str, columns: Mapping[str, Any], seed: int) -> "Future[dict[str, Any]]":
        """Queue this task; the future may raise InstanceFailed or InstancesLost."""
        self.columns = columns
        self._queue.enqueue(self)
        return self.done

    def end(self) -> None:
        self._queue.cancel(self)


class TaskQueue:
    """Samples that wait for agents outside of the run, in place of a `ForkPool`."""

    def __init__(self, run_dir: Path, timeout: float) -> None:
        """`timeout` seconds limit an agent's time for a task, and a wait without any agent."""
        self._file, self._timeout = run_dir / FILE, timeout
        self._token = new_token()
        self._waiting: deque[ExternalTask] = deque()
        self._taken: dict[str, ExternalTask] = {}
        self._last_asked = 0.0
        """Time at which an agent last asked for a task or had one, or the first task came."""

    def wait_ready(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Return at once: agents come when they like."""

    def new_instance(self) -> ExternalTask:
        return ExternalTask(self)

    def close(self) -> None:
        """Remove `agents.json`: agents end when it is gone."""
        self._file.unlink(missing_ok=True)

    def enqueue(self, task: ExternalTask) -> None:
        if not self._waiting:
            self._last_asked = running_time()
        self._waiting.append(task)

    def cancel(self, task: ExternalTask) -> None:
        if task in self._waiting:
            self._waiting.remove(task)
        self._taken.pop(task.columns.get("key", ""), None)

    def serve(self, application: web.Application) -> None:
        application.router.add_post("/tasks", self._take)
        application.router.add_post("/tasks/{key}", self._finish)
        application.cleanup_ctx.append(self._watching)

    def publish_address(self, url: str) -> None:
        """Write address and token to `agents.json`, readable by this user only; print its path."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        part = self._file.with_suffix(".part")
        part.unlink(missing_ok=True)  # `os.open` would keep the permissions of an old file
        with open(os.open(part, os.O_CREAT | os.O_WRONLY, 0o600), "w", encoding="utf-8") as file:
            json.dump({"url": url, "token": self._token}, file)
        part.replace(self._file)
        print(
            f"agents take tasks at {url}/tasks: address and token are in {self._file}", flush=True
        )

    async def _take(self, request: web.Request) -> web.Response:
        if refusal := self._refusal(request):
            return refusal
        until = running_time() + WAIT_SECONDS
        while running_time() < until:
            if task := self._next():
                # An agent on another host reaches the endpoint as it has reached this route.
                url = f"{request.scheme}://{request.host}"
                body = {**task.columns, "url": url}
                return web.json_response(text=json.dumps(body, default=str))
            await asyncio.sleep(POLL_SECONDS)
        return web.Response(status=204)

    def _next(self) -> ExternalTask | None:
        self._last_asked = running_time()
        if not self._waiting:
            return None
        task = self._waiting.popleft()
        task.deadline = running_time() + self._timeout
        self._taken[task.columns["key"]] = task
        return task

    async def _finish(self, request: web.Request) -> web.Response:
        if refusal := self._refusal(request):
            return refusal
        try:
            # Read before the task is closed: an agent that disconnects here may report again.
            body = await request.text()
        except (ValueError, LookupError) as error:  # not text, or of an unknown encoding
            return _answer(400, f"the request cannot be read: {error!r}")
        task = self._taken.pop(request.match_info["key"], None)
        self._last_asked = running_time()
        if task is None:
            return _answer(404, "no agent has this task: it was late, or given up")
        try:
            task.done.set_result(_ending(body))
        except InstanceFailed as failure:
            task.done.set_exception(failure)
        except (ValueError, RecursionError) as error:
            task.done.set_exception(InstanceFailed(str(error)))
            return _answer(400, str(error))
        return _answer(200, "")

    def _refusal(self, request: web.Request) -> web.Response | None:
        given = as_unicode(request.headers.get("Authorization", "")).encode()
        if hmac.compare_digest(given, bearer(self._token)["Authorization"].encode()):
            return None
        return _answer(401, f"wrong token: the token of this run is in {FILE}")

    async def _watching(self, application: web.Application) -> AsyncIterator[None]:
        watch = asyncio.create_task(self._watch())
        yield
        watch.cancel()

    async def _watch(self) -> None:
        """Fail tasks of late agents, and all waiting ones when no agent has asked for too long."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            now = running_time()
            late = [task for task in self._taken.values() if task.deadline < now]
            for task in late:
                del self._taken[task.columns["key"]]
                self._last_asked = now  # a busy agent could not ask for another task
            lost = []
            if not self._taken and now - self._last_asked > self._timeout:
                lost, self._waiting = [*self._waiting], deque()
            for task in late:
                text = f"no report of its agent within agent.timeout {self._timeout:g} s"
                task.done.set_exception(InstanceFailed(text))
            for task in lost:
                text = f"agent.listen: no agent has asked for a task for {self._timeout:g} s"
                task.done.set_exception(InstancesLost(text))


def _ending(body: str) -> dict[str, Any]:
    """Parse a report: reward and metrics. Raises InstanceFailed for its error, else ValueError."""
    ending = json.loads(body)
    if isinstance(ending, dict) and ending.get("error"):
        raise InstanceFailed(str(ending["error"]))
    return checked(ending)


def _answer(status: int, text: str) -> web.Response:
    return web.json_response({"error": text} if text else {}, status=status)
