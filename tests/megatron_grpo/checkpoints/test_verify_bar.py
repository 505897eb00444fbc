"""Verifying a large checkpoint shows its progress."""

import io

import pytest
from rich.console import Console

from megatron_grpo.checkpoints import manifest as verify_bar
from megatron_grpo.checkpoints.manifest import VerifyBar


def shown(*, is_terminal: bool) -> str:
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=80)
    with VerifyBar("verifying step_10", 4_000_000, console) as bar:
        bar.advance(1_000_000)
    return console.file.getvalue()


def test_a_wait_that_is_short_shows_nothing():
    assert shown(is_terminal=True) == ""


def test_a_long_one_shows_on_a_terminal_how_much_is_done(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(verify_bar, "PATIENCE_SECONDS", -1.0)
    assert "verifying step_10" in shown(is_terminal=True)
    assert "1.0/4.0 MB" in shown(is_terminal=True)
    assert shown(is_terminal=False) == ""
