"""Bars of slow phases."""

import io

import pytest
from rich.console import Console

from megatron_grpo import bars
from megatron_grpo.bars import waiting


def shown(*, is_terminal: bool, shows: bool = True) -> str:
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=80)
    with waiting("reading [models/8B]", shows=shows, console=console) as show:
        show(1_000_000, 4_000_000)
        show(4_000_000, 4_000_000)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_waiting_shows_nothing_when_short(is_terminal):
    assert shown(is_terminal=is_terminal) == ""


def test_waiting_shows_how_much_is_done(monkeypatch):
    monkeypatch.setattr(bars, "PATIENCE_SECONDS", -1.0)
    assert "reading [models/8B]" in shown(is_terminal=True)
    assert "1.0/4.0 MB" in shown(is_terminal=True)
    assert shown(is_terminal=False) == ""
    assert shown(is_terminal=True, shows=False) == ""


def test_waiting_without_a_terminal_is_a_line_at_times(monkeypatch):
    monkeypatch.setattr(bars, "LINE_SECONDS", 0.0)
    assert shown(is_terminal=False) == "reading [models/8B]: 1.0 MB of 4.0 MB\n"
    assert shown(is_terminal=False, shows=False) == ""
    assert shown(is_terminal=True) == ""
