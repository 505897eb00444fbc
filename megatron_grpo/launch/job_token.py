"""The secret that a job's trainers and rollout engines share.

Processes receive it in their environment, which other users of the machine cannot read (unlike a
command line), and it is never written to disk. This module imports next to nothing, because the
command line needs it.
"""

import re
import secrets
from collections.abc import MutableMapping

TOKEN_VARIABLE = "MEGATRON_GRPO_TOKEN"
"""Holds the token for engines given by address; engines that a run starts get a fresh one."""

MIN_TOKEN_LENGTH = 16

MAKE_ONE = f"make one with `export {TOKEN_VARIABLE}=$(openssl rand -hex 32)`"


def new_token() -> str:
    """A random token of 256 bits."""
    return secrets.token_hex(32)


def take_token(environ: MutableMapping[str, str]) -> str | None:
    """The user's token, removed from `environ` so that no child process inherits it."""
    return environ.pop(TOKEN_VARIABLE, None)


def check_token(token: str | None) -> str:
    """Return `token`, or raise ValueError (without showing it) if it is missing or too weak."""
    if not token:
        raise ValueError(
            f"{TOKEN_VARIABLE} is not set: engines given by address and their trainers share a "
            f"token; {MAKE_ONE} and use the same for both"
        )
    if len(token) < MIN_TOKEN_LENGTH:
        raise ValueError(
            f"{TOKEN_VARIABLE} has {len(token)} characters, at least {MIN_TOKEN_LENGTH} are "
            f"needed: {MAKE_ONE}"
        )
    if not re.fullmatch(r"[!-~]+", token):
        raise ValueError(
            f"{TOKEN_VARIABLE} has spaces or other characters that an HTTP header cannot carry: "
            f"{MAKE_ONE}"
        )
    return token


def bearer(token: str) -> dict[str, str]:
    """The HTTP header that authorizes a request."""
    return {"Authorization": f"Bearer {token}"}
