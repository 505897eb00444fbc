"""Runs programs in processes forked from one that has imported torch. Imports next to nothing."""

import importlib
import os
import signal
import sys
from pathlib import Path


def run_main(module: str, arguments: list[str], stdout: Path, stderr: Path) -> None:
    """Run `main` of `module` as a program, in its own process group."""
    os.setpgid(0, 0)
    for number, file in ((1, stdout), (2, stderr)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the fork server ignores it
    sys.argv = [module, *arguments]
    importlib.import_module(module).main()
