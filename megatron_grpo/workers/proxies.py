"""HTTP proxies of the environment (`http_proxy` and the like), for addresses outside of the run.

It imports the standard library alone: adapters of environment libraries use it.
"""

import os
import socket
from collections.abc import Mapping
from functools import cache
from ipaddress import ip_address
from urllib.parse import urlsplit
from urllib.request import proxy_bypass

PROXIES = ("http_proxy", "https_proxy", "all_proxy")
EXCEPTIONS = ("no_proxy", "NO_PROXY")
"""Clients read either variable; of two that are set, most prefer the first."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")


def direct(environ: Mapping[str, str], *hosts: str) -> dict[str, str]:
    """Variables that except loopback, this host and `hosts` from proxies, in addition to the user's
    exceptions; empty if `environ` has no proxy.

    >>> direct({"http_proxy": "http://proxy:3128", "NO_PROXY": ".corp"})["no_proxy"]
    '.corp,localhost,127.0.0.1,::1,node-7'
    """
    if not proxy_variables(environ):
        return {}
    own = [*LOOPBACK, socket.gethostname(), *hosts]
    set_before = [environ[name] for name in EXCEPTIONS if name in environ]
    return {
        name: _with_hosts(environ.get(name, set_before[0] if set_before else ""), own)
        for name in EXCEPTIONS
    }


def proxy_variables(environ: Mapping[str, str]) -> dict[str, str]:
    names = [*PROXIES, *map(str.upper, PROXIES)]
    return {name: environ[name] for name in names if environ.get(name)}


def is_here(url: str) -> bool:
    """Whether `url` is loopback or this host, where a proxy elsewhere cannot connect."""
    host = (urlsplit(url).hostname or "").lower()
    names = {"localhost", socket.gethostname().lower()}
    return host in names or host.endswith(".localhost") or _is_own_number(host)


def proxy_of(url: str) -> str | None:
    """The environment's proxy for `url`; None if there is none, or `url` is on this host."""
    variable = "" if is_here(url) else _variable_for(url)
    address = os.environ.get(variable, "")
    return address if "://" in address else f"http://{address}" if address else None


def proxy_hint(url: str) -> str:
    """Advice on `NO_PROXY` after a failed request for `url`; empty if no proxy applies."""
    # The proxy's address is left out: it may hold a password.
    if not (variable := _variable_for(url)):
        return ""
    host = urlsplit(url).hostname
    return (
        f" (the environment has {variable}: if that proxy answers in the place of "
        f"{host}, add {host} to NO_PROXY)"
    )


def _variable_for(url: str) -> str:
    """The variable of the environment that names the proxy for `url`; empty if none does."""
    parts, named = urlsplit(url), proxy_variables(os.environ)
    excepted = {"no": next((os.environ[name] for name in EXCEPTIONS if name in os.environ), "")}
    if not parts.hostname or proxy_bypass(parts.hostname, excepted):
        return ""
    variables = [f"{kind}_proxy" for kind in (parts.scheme, "all")]
    return next((v for each in variables for v in (each, each.upper()) if v in named), "")


def _with_hosts(excepted: str, hosts: list[str]) -> str:
    names = [name.strip() for name in excepted.split(",") if name.strip()]
    if names == ["*"]:  # it excepts all hosts, but only while no other name follows
        return "*"
    return ",".join(dict.fromkeys([*names, *hosts]))


@cache
def _is_own_number(host: str) -> bool:
    try:
        address = ip_address(host)
    except ValueError:
        return False
    if address.is_loopback or address.is_unspecified:
        return True
    kind = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(kind, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((host, 0))  # only a host's own addresses can be bound
        except OSError:
            return False
    return True
