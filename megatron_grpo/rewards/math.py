"""Reward `math_answer`: the same mathematical value, however it is written."""

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from latex2sympy2_extended.math_normalization import extract_boxed_content
from math_verify import parse, verify

from parallel.clock import running_time, stopped_time

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
# What may surround a marked answer: spaces, Markdown, a sign of currency.
EDGES = re.compile(r"^[\s*_`€£¥]+|[\s*_`]+$")
BRACE = re.compile(r"(?<!\\)[{}]")
# math-verify finds an answer whenever there is a letter or digit between dollars, or in a box.
FORMULA = re.compile(
    r"(?<![\\\d])\$(?:\\\$|[^\n$])*[^\W_](?:\\\$|[^\n$])*(?<!\\)\$|\\boxed\{.*[^\W_].*\}"
)


def math_answer(
    completions: list[str],
    answer: list[Any],
    finish_reasons: list[str],
    *,
    boxed: bool = False,
    only_finished: bool = False,
    reward_timeout: float = math.inf,
    **_: Any,
) -> list[float | Exception]:
    """1 when the completion's final answer equals the reference answer, else 0.

    The final answer is the text after the last `####` (GSM8K), unless that is the heading of more
    text or a box follows it; otherwise what math-verify extracts: a box, a formula or the last
    number. Several boxes in a row are the members of a set. With `boxed` it is otherwise the last
    box or boxes, or there is none: reasoning that stops at the right number is no answer. With
    `only_finished` a completion that reached the length limit has none. A completion without a
    final answer, or with one too hard to evaluate in time, is wrong.
    If so many are slow that the call runs out of time, the remaining ones get no score. Raises
    ValueError for a reference answer that cannot be parsed.
    """
    deadline = running_time() + SHARE_OF_TIME * reward_timeout
    references = {wanted: _reference(wanted) for wanted in set(map(str, answer))}

    def is_equal(completion: str, wanted: str) -> bool:
        found = _found(completion, boxed=boxed)
        return bool(verify(references[wanted], found, timeout_seconds=TIMEOUT_SECONDS))

    def score(completion: str, wanted: str, finish_reason: str) -> float | Exception:
        if only_finished and finish_reason == "length":
            return 0.0
        if running_time() >= deadline:
            return LATE
        return float(_undisturbed(lambda: is_equal(completion, wanted)))

    given = zip(completions, map(str, answer), finish_reasons, strict=True)
    return [score(*each) for each in given]


def can_read(answer: Any) -> bool:
    """Whether a reference answer contains anything to compare with; usually needs no parsing."""
    readings = _readings(str(answer))
    return any(map(FORMULA.search, readings)) or any(map(parse, readings))


def _found(completion: str, *, boxed: bool) -> list[Any]:
    """Parse the final answer by math-verify; a marked one is read like a reference."""
    marked = _marked_answer(completion)
    if marked is not None:
        readings = _readings(EDGES.sub("", marked))
    else:
        readings = (_last_boxes(completion) if boxed else completion,)
    parsed = (parse(text, parsing_timeout=TIMEOUT_SECONDS) for text in readings)
    return next(filter(None, parsed), [])


def _reference(answer: str) -> list[Any]:
    for text in _readings(answer):
        if parsed := _undisturbed(partial(parse, text)):
            return [*parsed]
    raise ValueError(f"no mathematical answer in the reference {answer!r}")


def _undisturbed[T](call: Callable[[], T]) -> T:
    """The result of `call`, which has a time-out of the kernel: the second, if stopped in it."""
    stopped, result = stopped_time(), call()
    return call() if stopped_time() > stopped else result


def _readings(answer: str) -> tuple[str, ...]:
    """The texts in which math-verify looks for the reference, in order."""
    marked = _marked_answer(answer)
    final = (answer if marked is None else marked).strip()
    if DELIMITER.search(final):
        return (final,)
    # It looks for formulas between dollars: in a bare x^2 + 1 it would find only a 1, and in prose
    # between dollars it would multiply the letters.
    formula = f"${final}$"
    return (final, formula) if WORD.search(TEXT.sub("", final)) else (formula, final)


def _marked_answer(text: str) -> str | None:
    """Text after the last `####`; None if there is none, or if it is a heading."""
    *before, tail = MARKER.split(text)
    line, _, below = tail.strip().partition("\n")
    is_heading = "\\boxed" in below or (below and HEADING.match(line))
    return line if before and not is_heading else None


def _last_boxes(text: str) -> str:
    """A box of what math-verify reads in the last ones; empty without any, or if it is not closed.

    It joins boxes less than 10 characters apart, or 70 with an "and", "or", comma or semicolon
    between them, and takes a `\\fbox` for one.
    """
    start, command, content = text.rpartition("\\boxed{")
    if not command:
        return ""
    depth = 1
    for brace in BRACE.finditer(content):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            closed = (start + command + content[: brace.end()]).replace("\\fbox", "")
            return f"\\boxed{{{extract_boxed_content(closed)}}}"
    return ""
