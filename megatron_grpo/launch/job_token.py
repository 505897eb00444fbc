"""The secret that a job's trainers and rollout engines share.

It gets into a process by its environment, which other users of the machine cannot read as they can
a command line, and is never written anywhere. Imports next to nothing: the command line reads it.
"""

import re
import secrets
from collections.abc import MutableMapping

TOKEN_VARIABLE = "MEGATRON_GRPO_TOKEN"
"""Holds the token, where engines are given by address; the run makes one for those it starts."""

MIN_TOKEN_LENGTH = 16

MAKE_ONE = f"make one by `export {TOKEN_VARIABLE}=$(openssl rand -hex 32)`"


def new_token() -> str:
    """A token that nobody can guess."""
    return secrets.token_hex(32)


def take_token(environ: MutableMapping[str, str]) -> str | None:
    """The token that a user gave, removed from `environ` so that no child process inherits it."""
    return environ.pop(TOKEN_VARIABLE, None)


def check_token(token: str | None) -> str:
    """`token`; raises ValueError, which does not show it, when it is none or can be guessed."""
    if not token:
        raise ValueError(
            f"{TOKEN_VARIABLE} is not set: engines that are given by address and their trainers "
            f"share a token; {MAKE_ONE} and give both the same"
        )
    if len(token) < MIN_TOKEN_LENGTH:
        raise ValueError(
            f"{TOKEN_VARIABLE} has {len(token)} characters, at least {MIN_TOKEN_LENGTH} are "
            f"needed: {MAKE_ONE}"
        )
    if not re.fullmatch(r"[!-~]+", token):
        raise ValueError(
            f"{TOKEN_VARIABLE} has spaces or other characters that no HTTP header carries: "
            f"{MAKE_ONE}"
        )
    return token


def bearer(token: str) -> dict[str, str]:
    """The header of a request that is let in."""
    return {"Authorization": f"Bearer {token}"}
