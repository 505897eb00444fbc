"""Programs in completions, and the tests that they pass."""

import asyncio
import json
import math
from contextlib import closing

import pytest

from helpers.runs.rewards import sample_of
from helpers.runs.sandboxes import needs_bubblewrap
from megatron_grpo.config.reward import RewardConfig, RewardFunction
from megatron_grpo.rewards.by_source import reference_fault
from megatron_grpo.rewards.pool import RewardPool
from megatron_grpo.rewards.unit_tests import program_in, unit_tests

pytestmark = needs_bubblewrap
ASSERTIONS = ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]
SUMS = {"inputs": ["1 2\n", "2 2\n"], "outputs": ["3\n", "4"]}
CALLS = {"fn_name": "add", "inputs": [[1, 2], [[1], [2]]], "outputs": [3, [[1, 2]]]}
ADD = "def add(a, b): return a + b"
METHOD = "class Solution:\n    def add(self, a, b): return a + b"
WRONG = "def add(a, b): return 3"


def scores(programs, tests, **arguments):
    """Scores of completions with these programs, all with the same tests."""
    completions = [f"Let us see.\n```python\n{program}\n```\nThat is it." for program in programs]
    return asyncio.run(unit_tests(completions, [tests] * len(programs), timeout=60, **arguments))


@pytest.mark.parametrize(
    ("tests", "right", "half"),
    [
        (ASSERTIONS, ADD, WRONG),
        (SUMS, "print(sum(map(int, input().split())))", "print(3)"),
        (CALLS, ADD, WRONG),
        (CALLS, METHOD, WRONG),
        ({**CALLS, "inputs": ["1\n2", "[1]\n[2]"], "outputs": ["3", "[1, 2]"]}, METHOD, WRONG),
        (json.dumps(SUMS), "print(sum(map(int, input().split())))", "print(3)"),
    ],
    ids=["statements", "stdin", "function", "method", "lines of JSON", "text"],
)
def test_a_program_passes_all_tests_or_a_share_of_them(tests, right, half):
    assert scores([right, half, "def"], tests) == [1, 0, 0]
    assert scores([right, half, "def"], tests, partial=True) == [1, 0.5, 0]
    assert scores([half], tests, max_tests=1) == [1]


ENDS = "import os; os._exit(0)"
NO_PRINT = "print = lambda *_: None\ndef add(a, b): return a + b"
NO_JSON = "import json; json.dumps = lambda _: '['\nprint = lambda *_: None\n" + WRONG
AT_EXIT = "import atexit; atexit.register(print, 3)\ndef add(a, b): return 5"
PRINTS = "import os; os.write(1, b'3'); os._exit(0)"


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        *((ENDS, tests) for tests in (ASSERTIONS, SUMS, CALLS)),
        *(("import sys; sys.exit()", tests) for tests in (ASSERTIONS, SUMS, CALLS)),
        (NO_PRINT, SUMS),
        (NO_JSON, CALLS),
        (AT_EXIT, ASSERTIONS),
        (AT_EXIT, CALLS),
        (PRINTS, {**CALLS, "inputs": [[1, 2]], "outputs": [3]}),
    ],
)
def test_a_program_that_ends_early_or_changes_its_tests_passes_nothing(program, tests):
    assert scores([program], tests) == [0]


def test_unit_tests_score_in_a_process_of_the_pool():
    arguments = {"timeout": 60}
    function = RewardFunction(name="unit_tests", arguments=arguments)
    rows = [
        sample_of(f"```python\n{program}\n```", {"tests": ASSERTIONS}) for program in (ADD, WRONG)
    ]
    with closing(RewardPool(RewardConfig(functions=(function,), num_workers=1))) as pool:
        scores = pool.score(rows, num_completions=2)
    assert scores == [{"unit_tests": 1.0}, {"unit_tests": 0.0}]


def test_late_and_greedy_programs_fail_and_cost_the_others_nothing():
    programs = ["while True: pass", "x = bytearray(1 << 40)", "import os\nwhile 1: os.fork()", ADD]
    completions = [f"```\n{program}\n```" for program in programs]
    assert asyncio.run(unit_tests(completions, [ASSERTIONS] * 4, timeout=5)) == [0, 0, 0, 1]


def test_the_last_block_of_python_is_the_program():
    assert program_in("```py\nfirst\n```\n```Python\nsecond\n```\n```cpp\nthird\n```") == "second\n"
    assert program_in("```python\nfirst\n```\nOutput:\n```\n3\n```") == "first\n"
    assert program_in("```c++\nfirst\n```\n```python\nsecond\n```") == "second\n"
    assert program_in("```\nfirst\n```\n```\nsecond\n```") == "second\n"
    assert program_in("```python\ncut off") == "cut off"
    assert program_in("print(1)") is None
    assert asyncio.run(unit_tests(["print(1)"], [ASSERTIONS])) == [0]


def test_without_a_sandbox_a_score_has_failed_and_none_is_zero(monkeypatch, tmp_path):
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho no namespaces >&2; exit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    [score] = scores([ADD], ASSERTIONS)
    assert "no program runs under bubblewrap here: no namespaces" in str(score)
    with pytest.raises(ValueError, match="no namespaces"):
        asyncio.run(unit_tests([], []))


@pytest.mark.parametrize(
    ("tests", "is_good"),
    [
        (ASSERTIONS, True),
        (json.dumps(CALLS), True),
        ([], False),
        ("no JSON", False),
        (3, False),
        ([1, 2], False),
        ({"inputs": ["1"], "outputs": []}, False),
        ({"inputs": "1", "outputs": "2"}, False),
        ({"fn_name": "f", "inputs": ["no JSON"], "outputs": ["1"]}, False),
        (math.nan, False),
    ],
)
def test_rows_whose_tests_cannot_be_read_are_faults(tests, is_good):
    fault = reference_fault(RewardConfig(functions=["unit_tests"]))({"tests": tests})
    assert (fault is None) == is_good
    assert is_good or fault.kind == "no tests that unit_tests can read"
