"""Writes docs/cli.md: `--help` of every command, 80 columns wide.

PYTHONPATH=. python docs/make_cli.py
"""

from pathlib import Path

from typer import Typer
from typer.main import get_group
from typer.testing import CliRunner

from checkpoint_convert.cli import app as conversion
from megatron_grpo.cli import app as trainer

PAGE = Path(__file__).with_name("cli.md")
BEGIN = """\
# Commands

`megatron-grpo` trains and looks at runs; `checkpoint-convert` converts checkpoints. Both complete
commands and options in bash and zsh after `--install-completion`, and keys of a config with their
defaults.

| exit code of `train` | meaning |
|---|---|
| 0 | the run is complete, and its model exported |
| 1 | the run failed |
| 2 | a mistake in config, model, data or settings; nothing was trained |
| 75 | SIGTERM or SIGUSR1, to any rank: all saved the same step; the same command resumes |
| 129, 130, 131 | ended at once by SIGHUP, Ctrl-C or SIGQUIT |
"""


def page() -> str:
    parts = [BEGIN]
    for name, app in ("megatron-grpo", trainer), ("checkpoint-convert", conversion):
        parts.append(section(app, name))
        parts += [section(app, name, command) for command in get_group(app).commands]
    return "\n".join(parts)


def section(app: Typer, *words: str) -> str:
    runner = CliRunner(env={"COLUMNS": "80"})
    shown = runner.invoke(app, [*words[1:], "--help"], prog_name=words[0], color=False)
    assert shown.exit_code == 0
    level = "#" * (len(words) + 1)
    return f"{level} {' '.join(words)}\n\n```text\n{shown.output.strip()}\n```\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
