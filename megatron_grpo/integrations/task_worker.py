"""Takes tasks of a run that has `agent.listen`, for all adapters of environment libraries.

Each adapter is a command that runs in its library's own environment of packages, where this
project's folder is on PYTHONPATH and httpx is installed. It imports no more of the project than
this file, `unicode.py` and `workers/proxies.py`.

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
"""Time-out of a request; longer than the run takes to answer that it has no task."""
AGAIN_SECONDS = 2.0
"""Pause between attempts to reach a run, which may be starting again."""
Json = dict[str, Any]
Act = Callable[[Json], Awaitable[Json]]
"""Acts on a task, and returns its report: `reward` and `metrics`, or `error`. An exception costs
this task alone."""


def parser_of(doc: str | None, source: str, at_once: int) -> argparse.ArgumentParser:
    """Arguments of every adapter; `source` is the help of its argument SOURCE."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["rows", "serve"])
    parser.add_argument("source", help=source)
    parser.add_argument("file", type=Path, help="of the rows to write, or the run's agents.json")
    parser.add_argument("--most", type=int, help="rows")
    parser.add_argument("--at-once", type=int, default=at_once, help="episodes at a time")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments of this process, which ends if there is no run to serve."""
    options = parser.parse_args()
    reach_directly()
    if options.action == "serve" and not options.file.exists():
        parser.error(f"{options.file} does not exist: no run with agent.listen is there")
    return options


def reach_directly(*urls: str) -> None:
    """Keep proxies of the environment away from this host and `urls`, for clients of libraries."""
    os.environ |= direct(os.environ, *(urlsplit(url).hostname or "" for url in urls))


def write_rows(file: Path, rows: Iterable[Json], most: int | None) -> None:
    """Write rows of the data, `most` of them or all."""
    with file.open("w", encoding="utf-8") as opened:
        opened.writelines(json.dumps(row) + "\n" for row in islice(rows, most))


async def serve(file: Path, act: Act, at_once: int) -> None:
    """Act on up to `at_once` tasks at a time until the run is over and its `file` is gone."""
    async with httpx.AsyncClient(timeout=WAIT_SECONDS, trust_env=False) as http:
        await asyncio.gather(*(_take_tasks(file, act, http) for _ in range(at_once)))


async def _take_tasks(file: Path, act: Act, http: httpx.AsyncClient) -> None:
    while run := run_at(file):
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
    """Report of a task in JSON; the run refuses a reward that is not finite."""
    try:
        return json.dumps(await act(task))
    except Exception as error:  # of any kind: an environment is somebody else's code
        return json.dumps({"error": repr(error)})


def run_at(file: Path) -> Json | None:
    """The address and the token of the run; None when it is over."""
    try:
        run: Json = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return run
