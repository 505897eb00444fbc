"""Proxies in the environment of a test."""

import pytest

DEAD = "http://127.0.0.1:9"
"""Nothing listens there, so requests through this proxy are lost."""
KINDS = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


def set_proxies(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    """Set these proxy variables and unset all others."""
    for name in (*KINDS, *map(str.upper, KINDS)):
        monkeypatch.setenv(name, "")  # so that values set by the test are undone, too
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
