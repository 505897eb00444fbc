"""Reward `judge`: a score from a language model behind an OpenAI-compatible endpoint."""

import asyncio
import os
import random
import re
import ssl
import time
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import httpx

NUMBER = r"((?:(?<![\w.])-)?\d+(?:\.\d+)?)"
LAST_NUMBER = NUMBER + r"(?:\W*(?:/|\bout of\b|\bof\b|\bto\b)\W*\d+(?:\.\d+)?)?"
"""Matches the 8 of "8/10", "8 out of 10" and "8 (of 10)"."""
TEMPLATE_FIELD = re.compile(r"\{(prompt|completion|answer)\}")
DEFAULT_KEY = "OPENAI_API_KEY"
SHARE_OF_TIME = 0.9
"""Share of `reward.timeout` after which unanswered requests fail, so that other scores count."""
FIRST_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.5, 8.0
"""Exponential backoff before a request is sent again."""
RETRIED_STATUS_CODES = (408, 409, 429)
"""Status codes that, like 5xx, may be transient; the same as in OpenAI's own client."""
MAX_TEXT = 300


class JudgeError(Exception):
    """A completion could not be scored."""


async def judge(
    completions: list[str],
    prompts: list[str],
    answer: list[Any] | None = None,
    *,
    base_url: str,
    model: str,
    prompt: str,
    reward_timeout: float,
    pattern: str = LAST_NUMBER,
    max_score: float = 1.0,
    api_key_env: str = DEFAULT_KEY,
    extra_body: dict[str, Any] | None = None,
    **_: Any,
) -> list[float | JudgeError]:
    """The number in `model`'s answer to `prompt`, divided by `max_score`; a JudgeError without one.

    A generative reward model (arXiv 2306.05685, 2408.15240). `prompt` is a template in which
    {prompt} (as the model reads it), {completion} and {answer} are filled in; the score is the
    first group of the last match of the regular expression `pattern`, by default the last number
    (8 in "8/10" and "8 out of 10"). A number above `max_score`, or below its negative, is not a
    score. Each completion is a request of its own, at temperature 0, to
    `base_url`/chat/completions (`base_url` usually ends in /v1), with the fields of `extra_body`,
    such as max_tokens. 408, 409, 429, 5xx and lost connections are retried while time is left. The
    API key is read from the environment variable `api_key_env`, never from the config.
    """
    expression = _checked(base_url, prompt, max_score, pattern)
    if completions and "{answer}" in prompt and answer is None:
        raise ValueError(
            "the judge's prompt contains {answer}, and the data has no column `answer`"
        )
    texts = [
        _fill(prompt, {"prompt": question, "completion": completion, "answer": reference})
        for question, completion, reference in zip(
            prompts, completions, answer or [None] * len(prompts), strict=True
        )
    ]
    deadline = time.monotonic() + SHARE_OF_TIME * reward_timeout
    fields = {"model": model, "temperature": 0} | (extra_body or {})
    async with httpx.AsyncClient(
        base_url=base_url,
        headers=_authorization(api_key_env),
        verify=_certificates(),
        limits=httpx.Limits(max_connections=None),
        timeout=None,  # each request gets the time that is left
    ) as client:

        async def score(text: str) -> float | JudgeError:
            body = fields | {"messages": [{"role": "user", "content": text}]}
            try:
                return _score(await _ask(client, body, deadline), expression, max_score)
            except JudgeError as error:
                return error

        return await asyncio.gather(*map(score, texts))


def _checked(base_url: str, prompt: str, max_score: float, pattern: str) -> re.Pattern[str]:
    """The compiled `pattern`; raises ValueError for unusable arguments."""
    url, expression = urlsplit(base_url), re.compile(pattern, re.DOTALL)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ValueError(f"base_url {base_url!r} is not an address like http://host:8000/v1")
    if "{completion}" not in prompt:
        raise ValueError(
            "prompt has no {completion}: put it where the judge is to read the completion"
        )
    if not max_score > 0:
        raise ValueError(f"max_score {max_score} must be above 0, such as 10")
    if not expression.groups:
        raise ValueError(rf"pattern {pattern!r} has no group: write for example Score: (\d+)")
    return expression


def _fill(template: str, values: dict[str, Any]) -> str:
    """Fill in all fields in one pass, so that all other braces, also of completions, stay text."""
    return TEMPLATE_FIELD.sub(lambda field: str(values[field[1]]), template)


def _authorization(api_key_env: str) -> dict[str, str]:
    key = os.environ.get(api_key_env)
    if key is None and api_key_env != DEFAULT_KEY:
        raise ValueError(f"api_key_env: the environment has no variable {api_key_env}: set it")
    return {"Authorization": f"Bearer {key}"} if key else {}


@cache
def _certificates() -> ssl.SSLContext:
    """Cached, since reading them takes longer than a request."""
    return httpx.create_ssl_context()


async def _ask(client: httpx.AsyncClient, body: dict[str, Any], deadline: float) -> str:
    """The model's answer; raises JudgeError if there is none before `deadline`."""
    pause, last = FIRST_BACKOFF_SECONDS, "no answer"
    while (left := deadline - time.monotonic()) > 0:
        try:
            async with asyncio.timeout(left):
                response = await client.post("chat/completions", json=body)
            if response.is_success:
                return _content(response)
            last = f"status {response.status_code}: {response.text[:MAX_TEXT]}"
            if response.status_code not in RETRIED_STATUS_CODES and not response.is_server_error:
                raise JudgeError(f"{client.base_url} answered {last}")
        except (httpx.RequestError, TimeoutError) as error:
            last = repr(error)
        # Jitter: requests that were turned away together do not all come back together.
        await asyncio.sleep(min(pause * random.uniform(0.5, 1), deadline - time.monotonic()))
        pause = min(2 * pause, MAX_BACKOFF_SECONDS)
    raise JudgeError(f"{client.base_url} gave no answer in time, at last {last}")


def _content(response: httpx.Response) -> str:
    try:
        return str(response.json()["choices"][0]["message"]["content"])
    except (ValueError, LookupError, TypeError):
        raise JudgeError(f"not a chat completion: {response.text[:MAX_TEXT]}") from None


def _score(text: str, expression: re.Pattern[str], max_score: float) -> float:
    found = [match[1] for match in expression.finditer(text)]
    try:
        number = float(found[-1])
    except (LookupError, TypeError, ValueError):  # no match, or a group that is not a number
        raise JudgeError(f"no score in the judge's answer {text[-MAX_TEXT:]!r}") from None
    if not abs(number) <= max_score:
        raise JudgeError(f"the judge's score {number} is beyond max_score {max_score}")
    return number / max_score
