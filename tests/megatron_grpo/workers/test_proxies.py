"""Proxies of the environment, which stand before addresses outside of the run alone."""

import socket
from urllib.request import proxy_bypass

import pytest

from helpers.engines.proxies import set_proxies
from megatron_grpo.engines.server import engine_environment
from megatron_grpo.workers.proxies import EXCEPTIONS, direct, is_here, proxy_hint

PROXY = {"https_proxy": "http://me:secret@proxy:3128"}


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch):
    set_proxies(monkeypatch)


@pytest.mark.parametrize(
    ("before", "kept"),
    [
        ({}, []),
        ({"NO_PROXY": "a.corp, b.corp"}, ["a.corp", "b.corp"]),
        ({"no_proxy": "a.corp"}, ["a.corp"]),
    ],
)
def test_direct_extends_exceptions_under_both_names(before, kept):
    own = ["localhost", "127.0.0.1", "::1", socket.gethostname(), "10.0.0.5"]
    variables = direct(PROXY | before, "10.0.0.5")
    assert variables == dict.fromkeys(EXCEPTIONS, ",".join(kept + own))
    for host in (*kept, *own):
        assert proxy_bypass(host, {"no": variables["no_proxy"]})
    assert not proxy_bypass("api.wandb.ai", {"no": variables["no_proxy"]})


def test_direct_keeps_two_exceptions_apart():
    both = direct(PROXY | {"no_proxy": "a", "NO_PROXY": "b"})
    assert [value.split(",")[0] for value in both.values()] == ["a", "b"]
    assert direct(PROXY | {"NO_PROXY": "*"}) == dict.fromkeys(EXCEPTIONS, "*")


def test_direct_changes_nothing_without_a_proxy():
    assert direct({"NO_PROXY": "a", "http_proxy": ""}) == {}
    assert engine_environment({"A": "b"}, "0") == {"A": "b", "CUDA_VISIBLE_DEVICES": "0"}


def test_an_engine_reaches_itself_at_its_host():
    given = engine_environment(PROXY, "0", "10.0.0.5")
    assert given["no_proxy"].endswith(",10.0.0.5") and given["https_proxy"] == PROXY["https_proxy"]


@pytest.mark.parametrize(
    ("host", "is_own"),
    [
        ("localhost", True),
        ("127.0.0.2", True),
        ("[::1]", True),
        ("0.0.0.0", True),
        (socket.gethostname(), True),
        ("203.0.113.7", False),
        ("judge.example", False),
    ],
)
def test_is_here_knows_the_addresses_of_this_host(host, is_own):
    assert is_here(f"http://{host}:8000/v1") == is_own


def test_proxy_hint_names_the_variable_alone(monkeypatch):
    assert proxy_hint("https://judge.example/v1") == ""
    monkeypatch.setenv("HTTPS_PROXY", PROXY["https_proxy"])
    hint = proxy_hint("https://judge.example/v1")
    assert "HTTPS_PROXY" in hint and "judge.example to NO_PROXY" in hint and "secret" not in hint
    assert proxy_hint("http://judge.example/v1") == ""
    monkeypatch.setenv("NO_PROXY", ".example")
    assert proxy_hint("https://judge.example/v1") == ""
