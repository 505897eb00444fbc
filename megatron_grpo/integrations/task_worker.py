"""Takes tasks of a run with `agent.listen`; shared by all adapters of environment libraries.

An adapter runs in its library's own virtual environment, with httpx, and with this project's folder
on PYTHONPATH. It imports only this file, `unicode.py` and `workers/proxies.py` of the project.

    python -m megatron_grpo.integrations.ADAPTER rows SOURCE data.jsonl --most 1000
    python -m megatron_grpo.integrations.ADAPTER serve SOURCE runs/web/agents.json
"""

import argparse
import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from megatron_grpo.workers.proxies import direct

WAIT_SECONDS = 60.0
"""Time-out of a request; the run answers after at most `task_queue.WAIT_SECONDS`."""
AGAIN_SECONDS = 2.0
"""Pause between attempts to reach a run that may be restarting."""
Json = dict[str, Any]
Act = Callable[[Json], Awaitable[Json]]
"""Task -> report: `reward` and `metrics`, or `error`. An exception fails this task alone."""


def parser_of(doc: str | None, source: str, at_once: int) -> argparse.ArgumentParser:
    """Parser with the arguments of every adapter; `source` is the help of the argument SOURCE."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["rows", "serve"])
    parser.add_argument("source", help=source)
    parser.add_argument("file", type=Path, help="rows to write, or the run's agents.json")
    parser.add_argument("--most", type=int, help="most rows to write")
    parser.add_argument("--at-once", type=int, default=at_once, help="episodes at a time")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line; exits if there is no run to serve."""
    options = parser.parse_args()
    reach_directly()
    if options.action == "serve" and not options.file.exists():
        parser.error(f"{options.file} does not exist: no run with agent.listen is there")
    return options


def reach_directly(*urls: str) -> None:
    """Set NO_PROXY for this host and `urls`, for HTTP clients of the libraries."""
    os.environ |= direct(os.environ, *(urlsplit(url).hostname or "" for url in urls))


def write_rows(file: Path, rows: Iterable[Json], most: int | None) -> None:
    """Write at most `most` rows as JSON lines."""
    with file.open("w", encoding="utf-8") as opened:
        opened.writelines(json.dumps(row) + "\n" for row in islice(rows, most))


async def serve(file: Path, act: Act, at_once: int) -> None:
    """Act on up to `at_once` tasks at a time until the run is over and its `file` is gone."""
    async with httpx.AsyncClient(timeout=WAIT_SECONDS, trust_env=False) as http:
        await asyncio.gather(*(_take_tasks(file, act, http) for _ in range(at_once)))


async def _take_tasks(file: Path, act: Act, http: httpx.AsyncClient) -> None:
    while run := run_at(file):  # read for each task: a restarted run has another address and token
        url, headers = run["url"], {"Authorization": f"Bearer {run['token']}"}
        reach_directly(url)
        try:
            response = await http.post(f"{url}/tasks", headers=headers)
            if response.status_code == httpx.codes.NO_CONTENT:
                continue
            task = response.raise_for_status().json()
            end = await _end_of(task, act)
            await http.post(f"{url}/tasks/{task['key']}", headers=headers, content=end)
        except httpx.HTTPError:  # the run has ended, or starts again with another token
            await asyncio.sleep(AGAIN_SECONDS)


async def _end_of(task: Json, act: Act) -> str:
    """Act on a task; returns its report in JSON. The run checks that the reward is finite."""
    try:
        return json.dumps(await act(task))
    except Exception as error:  # any: environments are user code
        return json.dumps({"error": repr(error)})


def run_at(file: Path) -> Json | None:
    """Address and token of the run; None when it is over."""
    try:
        run: Json = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return run
