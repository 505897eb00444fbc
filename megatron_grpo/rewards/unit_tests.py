"""Reward `unit_tests`: runs the Python program in a completion against the tests of its row."""

import asyncio
import json
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from megatron_grpo.workers.sandbox import Kind, Sandbox, SandboxError

BLOCK = re.compile(
    r"^[ \t]*```[ \t]*([^\s`]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE
)
"""Matches a Markdown code block and its language; the last block may be unclosed."""
LANGUAGES = ("py", "python", "python3")
CALL = """
import json, sys
found = globals().get({name!r}) or getattr(Solution(), {name!r})
print({mark!r} + json.dumps(found(*json.load(sys.stdin))))
"""
"""Appended to a program: calls its function, or the method of its class `Solution`."""


@dataclass(frozen=True)
class UnitTest:
    """Code to append to a program, its stdin, and a check of its stdout."""

    ending: str
    stdin: str
    is_right: Callable[[str], bool]


async def unit_tests(
    completions: list[str],
    tests: list[Any],
    *,
    partial: bool = False,
    max_tests: int | None = None,
    timeout: float = 10.0,
    memory_megabytes: int = 1024,
    python: str | None = None,
    sandbox: Kind = "bubblewrap",
    **_: Any,
) -> list[float | Exception]:
    """1 if the program passes all tests, else 0; with `partial`, the share of passed tests.

    The program is the last block of Python in the completion; without one, the score is 0. The
    `tests` of a row, as values or as JSON in a string, have one of three forms:

    - a list of statements: each is run after the program (MBPP's `test_list`);
    - `{"inputs": [...], "outputs": [...]}`: stdin and the expected stdout, spaces and line breaks
      aside (APPS, TACO, LiveCodeBench);
    - `{"fn_name": ..., "inputs": [...], "outputs": [...]}`: lists of arguments and the expected
      result, in JSON, of a function of the program or a method of its class `Solution`.

    Only the first `max_tests` are run. Other arguments are for `Sandbox`.
    """
    if max_tests is not None and max_tests < 1:
        raise ValueError(f"max_tests {max_tests} must be at least 1")
    given = {} if python is None else {"python": python}
    box = Sandbox(sandbox=sandbox, timeout=timeout, memory_megabytes=memory_megabytes, **given)
    if not completions:  # the trial call at load time
        await box.check()

    async def score(completion: str, payload: Any) -> float | Exception:
        program = program_in(completion)
        if program is None:
            return 0.0
        try:
            return await share_passed(box, program, read_tests(payload)[:max_tests], partial)
        except SandboxError as error:
            return error

    return await asyncio.gather(*map(score, completions, tests))


def program_in(completion: str) -> str | None:
    """The last code block marked as Python, or the last unmarked one if none is.

    >>> program_in("So:\\n```python\\nprint(1)\\n```")
    'print(1)\\n'
    """
    blocks = [(language.lower(), text) for language, text in BLOCK.findall(completion)]
    named = [text for language, text in blocks if language in LANGUAGES]
    unnamed = [text for language, text in blocks if not language]
    return next(reversed(named or unnamed), None)


async def share_passed(
    box: Sandbox, program: str, tests: Sequence[UnitTest], partial: bool
) -> float:
    """Share of the tests that a program passes; unless `partial`, 0 after the first failure."""

    async def passes(test: UnitTest) -> bool:
        async with _free_core(asyncio.get_running_loop()):
            outcome = await box.run(f"{program}\n{test.ending}", test.stdin)
        return outcome.exit_code == 0 and test.is_right(outcome.stdout)

    if partial:
        return sum(await asyncio.gather(*map(passes, tests))) / len(tests)
    for test in tests:
        if not await passes(test):
            return 0.0
    return 1.0


@cache
def _free_core(loop: asyncio.AbstractEventLoop) -> asyncio.Semaphore:
    """Semaphore for the programs of all completions: at most one per core at a time."""
    return asyncio.Semaphore(len(os.sched_getaffinity(0)))


def read_tests(payload: Any) -> list[UnitTest]:
    """Parse the tests of a row; raises ValueError for a form that `unit_tests` does not have."""
    tests = json.loads(payload) if isinstance(payload, str) else payload
    if isinstance(tests, Mapping):
        found = _read_pairs(tests)
    elif isinstance(tests, list) and all(isinstance(test, str) for test in tests):
        found = [*map(_statement, tests)]
    else:
        raise ValueError("neither a list of statements nor inputs and outputs")
    if not found:
        raise ValueError("no test")
    return found


def can_be_run(tests: Any) -> bool:
    """Whether `unit_tests` can read the tests of a row."""
    try:
        read_tests(tests)
    except ValueError:
        return False
    return True


def _read_pairs(tests: Mapping[str, Any]) -> list[UnitTest]:
    inputs, outputs, name = (tests.get(key) for key in ("inputs", "outputs", "fn_name"))
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise ValueError("inputs and outputs are not lists")
    if len(inputs) != len(outputs):
        raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs")
    if name is not None:
        return [_call(str(name), *pair) for pair in zip(inputs, outputs, strict=True)]
    return [_printed(*map(_lines, pair)) for pair in zip(inputs, outputs, strict=True)]


def _lines(text: Any) -> str:
    return "\n".join(map(str, text)) if isinstance(text, list) else str(text)


def _printed(stdin: str, expected: str) -> UnitTest:
    return UnitTest("", stdin, lambda stdout: stdout.split() == expected.split())


def _statement(statement: str) -> UnitTest:
    # A program that calls exit(0) before the statement would pass by its exit code; the mark shows
    # that the statement has run.
    mark = secrets.token_hex(8)
    return UnitTest(f"{statement}\nprint({mark!r})", "", lambda text: text.endswith(f"{mark}\n"))


def _call(name: str, arguments: Any, expected: Any) -> UnitTest:
    mark = secrets.token_hex(8)
    # A text is LiveCodeBench's form: a line of JSON for each argument.
    is_text = isinstance(arguments, str)
    values = [json.loads(line) for line in arguments.splitlines()] if is_text else arguments
    value = json.loads(expected) if is_text else expected

    def is_right(stdout: str) -> bool:
        # The mark is random: the program cannot print it, and with it a result, by itself.
        _, found, rest = stdout.rpartition(mark)
        try:
            returned = json.loads(rest.partition("\n")[0])
            # APPS and TACO wrap an output in a list.
            return bool(found) and returned in (value, *_alone(value))
        except (ValueError, RecursionError):  # the program has replaced `print` or `json`
            return False

    return UnitTest(CALL.format(name=name, mark=mark), json.dumps(values), is_right)


def _alone(value: Any) -> list[Any]:
    return value if isinstance(value, list) and len(value) == 1 else []
