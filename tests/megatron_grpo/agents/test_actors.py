"""The processes in which agents act."""

import subprocess
import sys

import pytest

from megatron_grpo.agents.actors import checked, run_command

LIGHT = """
import sys
import megatron_grpo.agents.actors, megatron_grpo.environments.worker
heavy = {"torch", "numpy", "transformers", "aiohttp", "openai"}
print(sorted(heavy & sys.modules.keys()))
"""

TALKATIVE = """
import json, os, sys
row = json.load(sys.stdin)
print("x" * 100_000)
print(os.environ["A"], row["b"], sep="")
"""


def test_the_process_that_agents_are_forked_from_imports_nothing_heavy():
    assert subprocess.check_output([sys.executable, "-c", LIGHT]) == b"[]\n"


def test_a_program_gets_its_row_and_tells_its_reward_in_its_last_line():
    assert run_command([sys.executable, "-c", TALKATIVE], {"A": "1"}, {"b": 5}) == 15
    assert run_command([sys.executable, "-c", "pass"], {}, {"b": "x" * 200_000}) is None


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("import sys; print('why', file=sys.stderr); sys.exit(3)", "exit code 3; .*\nwhy"),
        ("print('no reward')", "no reward in JSON: 'no reward'"),
    ],
)
def test_a_program_that_fails_is_told_with_what_it_said(code, told):
    with pytest.raises(ValueError, match=told):
        run_command([sys.executable, "-c", code], {}, {})


def test_what_an_agent_tells_is_a_reward_with_or_without_metrics():
    assert checked(1) == {"reward": 1.0, "metrics": {}}
    assert checked({"metrics": {"files": 3}}) == {"reward": None, "metrics": {"files": 3.0}}
    for wrong in ("1", [1], float("nan"), {"reward": "x"}, {"metrics": [1]}):
        with pytest.raises(ValueError, match=r"its (reward|metrics)"):
            checked(wrong)
