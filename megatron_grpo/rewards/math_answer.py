"""Reward `math_answer`: the same mathematical value, however it is written."""

import math
import re
import time
from typing import Any

from math_verify import parse, verify

# Per expression. math-verify keeps them by SIGALRM, which works in the main thread only: the
# reward worker calls functions there.
TIMEOUT_SECONDS = 1
SHARE_OF_TIME = 0.8
"""In this share of `reward.timeout` a completion must be begun with."""
LATE = TimeoutError("those before it took the time of the call: raise reward.timeout")
MARKER = re.compile(r"(?<!#)####(?!#)")
# A line that begins with a word, numbered or not: `Step 2: solve`, `2. Solve`, not `72 dollars`.
HEADING = re.compile(r"[^\w\\]*(?:\w+[.):]\s+)?[^\W\d_]{2}")
# What LaTeX has in words: commands do not count, and these take some as arguments.
TEXT = re.compile(r"\\(?:begin|end|text\w*|math\w+|mbox|operatorname)(?:\s*\{[^{}]*\})+")
# Two letters may be a product, but behind a number a unit.
WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3}|\d\s[A-Za-z]{2}")
DELIMITER = re.compile(r"(?<!\\)(?:\$|\\\(|\\\[)")
# math-verify takes something of whatever has a letter or digit between dollars, or in a box.
FORMULA = re.compile(
    r"(?<![\\\d])\$(?:\\\$|[^\n$])*[^\W_](?:\\\$|[^\n$])*(?<!\\)\$|\\boxed\{.*[^\W_].*\}"
)


def math_answer(
    completions: list[str], answer: list[Any], *, reward_timeout: float = math.inf, **_: Any
) -> list[float | Exception]:
    """1 when the completion's final answer equals the reference answer, else 0.

    The final answer is what follows the last `####` (GSM8K), unless that is the heading of more
    text or a box comes after it; else what math-verify takes for it: a box, a formula, the last
    number. A completion without one, or with one too hard to evaluate in time, is wrong. Where many
    are, those that no time is left for have no score. A reference answer that cannot be read raises
    ValueError.
    """
    deadline = time.monotonic() + SHARE_OF_TIME * reward_timeout
    references = {wanted: _reference(wanted) for wanted in set(map(str, answer))}
    return [
        float(_equal(references[str(wanted)], completion)) if time.monotonic() < deadline else LATE
        for completion, wanted in zip(completions, answer, strict=True)
    ]


def can_read(answer: Any) -> bool:
    """Whether there is anything to compare with in a reference answer; mostly told at a glance."""
    readings = _readings(str(answer))
    return any(map(FORMULA.search, readings)) or any(map(parse, readings))


def _equal(reference: list[Any], completion: str) -> bool:
    found = parse(_final_answer(completion), parsing_timeout=TIMEOUT_SECONDS)
    return bool(verify(reference, found, timeout_seconds=TIMEOUT_SECONDS))


def _reference(answer: str) -> list[Any]:
    for text in _readings(answer):
        parsed: list[Any] = parse(text)
        if parsed:
            return parsed
    raise ValueError(f"no mathematical answer in the reference {answer!r}")


def _readings(answer: str) -> tuple[str, ...]:
    """What math-verify is to look for a reference in, one text after the other."""
    final = _final_answer(answer).strip()
    if DELIMITER.search(final):
        return (final,)
    # It looks for formulas between dollars; in a bare x^2 + 1 it would see a 1, and of prose
    # between dollars it would multiply the letters.
    formula = f"${final}$"
    return (final, formula) if WORD.search(TEXT.sub("", final)) else (formula, final)


def _final_answer(text: str) -> str:
    *before, tail = MARKER.split(text)
    line, _, below = tail.strip().partition("\n")
    is_heading = "\\boxed" in below or (below and HEADING.match(line))
    return line if before and not is_heading else text
