import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys
from checkpoint_convert.utf8_mode import enter_utf8_mode
enter_utf8_mode()
print(sys.flags.utf8_mode, sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("options", "environment", "is_utf8"),
    [
        ([], {"LC_ALL": "C", "PYTHONUTF8": "0"}, True),
        ([], {"LC_ALL": "C.UTF-8", "PYTHONUTF8": "0"}, False),  # as good
        (["-X", "utf8=0"], {"LC_ALL": "C"}, False),  # as requested, without restarting forever
    ],
)
def test_a_command_restarts_in_utf8_mode_where_the_locale_is_not_utf8(
    options, environment, is_utf8
) -> None:
    command = [sys.executable, *options, "-c", PROGRAM, "data/größe.jsonl"]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, timeout=60, check=True
    )
    mode, _, argv = done.stdout.decode(errors="replace").partition(" ")
    assert mode == str(int(is_utf8))
    if is_utf8:
        assert argv == "['data/größe.jsonl']\n"
