"""Reward `judge`: a score by a language model behind an OpenAI-compatible endpoint."""

import asyncio
import json
import re
from typing import Any

from megatron_grpo.rewards.http import (
    DEFAULT_KEY,
    MAX_TEXT,
    SHARE_OF_TIME,
    Unscored,
    check_base_url,
    http_client,
    key_from,
    post,
)
from parallel.clock import running_time

NUMBER = r"((?:(?<![\w.])-)?\d+(?:\.\d+)?)"
LAST_NUMBER = NUMBER + r"(?:\W*(?:/|\bout of\b|\bof\b|\bto\b)\W*\d+(?:\.\d+)?)?"
"""Matches the 8 of "8/10", "8 out of 10" and "8 (of 10)"."""
TEMPLATE_FIELD = re.compile(r"\{(prompt|completion|answer)\}")


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
) -> list[float | Unscored]:
    """The number in `model`'s answer to `prompt`, over `max_score`; Unscored without a number.

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
    deadline = running_time() + SHARE_OF_TIME * reward_timeout
    fields = {"model": model, "temperature": 0} | (extra_body or {})
    async with http_client(base_url, key_from(api_key_env)) as client:

        async def score(text: str) -> float | Unscored:
            body = fields | {"messages": [{"role": "user", "content": text}]}
            try:
                answered = await post(client, base_url, "chat/completions", body, deadline)
                return _score(_content(answered), expression, max_score)
            except Unscored as error:
                return error

        return await asyncio.gather(*map(score, texts))


def _checked(base_url: str, prompt: str, max_score: float, pattern: str) -> re.Pattern[str]:
    """The compiled `pattern`; raises ValueError for unusable arguments."""
    expression = re.compile(pattern, re.DOTALL)
    check_base_url(base_url)
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
    """Fill in the fields of a template. In one pass, since a completion may contain `{answer}`; not
    by `str.format`, since other braces stay as they are."""
    return TEMPLATE_FIELD.sub(lambda field: str(values[field[1]]), template)


def _content(answered: str) -> str:
    try:
        return str(json.loads(answered)["choices"][0]["message"]["content"])
    except (ValueError, LookupError, TypeError):
        raise Unscored(f"not a chat completion: {answered[:MAX_TEXT]}") from None


def _score(text: str, expression: re.Pattern[str], max_score: float) -> float:
    found = [match[1] for match in expression.finditer(text)]
    try:
        number = float(found[-1])
    except (LookupError, TypeError, ValueError):  # no match, or a group that is not a number
        raise Unscored(f"no score in the judge's answer {text[-MAX_TEXT:]!r}") from None
    if not abs(number) <= max_score:
        raise Unscored(f"the judge's score {number} is beyond max_score {max_score}")
    return number / max_score
