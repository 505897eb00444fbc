"""Reward `math_answer`: the same mathematical value, however it is written."""

import math
import re
import time
from typing import Any

from math_verify import parse, verify

# Per expression. math-verify enforces it by SIGALRM, which works only in the main thread, where the
# reward worker calls functions.
TIMEOUT_SECONDS = 1
SHARE_OF_TIME = 0.8
"""Share of `reward.timeout` after which no further completion is started."""
LATE = TimeoutError("those before it took the time of the call: raise reward.timeout")
MARKER = re.compile(r"(?<!#)####(?!#)")
# A line that begins with a word, numbered or not: `Step 2: solve`, `2. Solve`, not `72 dollars`.
HEADING = re.compile(r"[^\w\\]*(?:\w+[.):]\s+)?[^\W\d_]{2}")
# LaTeX commands that take words as arguments; such words do not make a text prose.
TEXT = re.compile(r"\\(?:begin|end|text\w*|math\w+|mbox|operatorname)(?:\s*\{[^{}]*\})+")
# Two letters may be a product, but after a number they are a unit.
WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3}|\d\s[A-Za-z]{2}")
DELIMITER = re.compile(r"(?<!\\)(?:\$|\\\(|\\\[)")
# math-verify finds an answer whenever there is a letter or digit between dollars, or in a box.
FORMULA = re.compile(
    r"(?<![\\\d])\$(?:\\\$|[^\n$])*[^\W_](?:\\\$|[^\n$])*(?<!\\)\$|\\boxed\{.*[^\W_].*\}"
)


def math_answer(
    completions: list[str], answer: list[Any], *, reward_timeout: float = math.inf, **_: Any
) -> list[float | Exception]:
    """1 when the completion's final answer equals the reference answer, else 0.

    The final answer is the text after the last `####` (GSM8K), unless that is the heading of more
    text or a box follows it; otherwise what math-verify extracts: a box, a formula or the last
    number. A completion without a final answer, or with one too hard to evaluate in time, is wrong.
    If so many are slow that the call runs out of time, the remaining ones get no score. Raises
    ValueError for a reference answer that cannot be parsed.
    """
    deadline = time.monotonic() + SHARE_OF_TIME * reward_timeout
    references = {wanted: _reference(wanted) for wanted in set(map(str, answer))}
    return [
        float(_equal(references[str(wanted)], completion)) if time.monotonic() < deadline else LATE
        for completion, wanted in zip(completions, answer, strict=True)
    ]


def can_read(answer: Any) -> bool:
    """Whether a reference answer contains anything to compare with; usually needs no parsing."""
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
    """The texts in which math-verify looks for the reference, in order."""
    final = _final_answer(answer).strip()
    if DELIMITER.search(final):
        return (final,)
    # It looks for formulas between dollars: in a bare x^2 + 1 it would find only a 1, and in prose
    # between dollars it would multiply the letters.
    formula = f"${final}$"
    return (final, formula) if WORD.search(TEXT.sub("", final)) else (formula, final)


def _final_answer(text: str) -> str:
    *before, tail = MARKER.split(text)
    line, _, below = tail.strip().partition("\n")
    is_heading = "\\boxed" in below or (below and HEADING.match(line))
    return line if before and not is_heading else text
