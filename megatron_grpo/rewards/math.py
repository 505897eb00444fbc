"""Reward `math_answer`: equal mathematical values, however they are written."""

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from latex2sympy2_extended.math_normalization import extract_boxed_content
from math_verify import parse, verify

from parallel.clock import running_time, stopped_time

# For each expression. math-verify enforces it by SIGALRM, which works in the main thread only:
# there the reward worker calls functions.
TIMEOUT_SECONDS = 1
SHARE_OF_TIME = 0.8
"""Share of `reward.timeout` after which no further completion is started."""
LATE = TimeoutError("earlier completions took the time of the call: raise reward.timeout")
MARKER = re.compile(r"(?<!#)####(?!#)")
# A line that begins with a word, numbered or not: `Step 2: solve`, `2. Solve`, not `72 dollars`.
HEADING = re.compile(r"[^\w\\]*(?:\w+[.):]\s+)?[^\W\d_]{2}")
# LaTeX commands that take words as arguments; such words do not make a text prose.
TEXT = re.compile(r"\\(?:begin|end|text\w*|math\w+|mbox|operatorname)(?:\s*\{[^{}]*\})+")
# Three letters are a word. Two may be a product (`ab`), but behind a number and a space a unit.
WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3}|\d\s[A-Za-z]{2}")
DELIMITER = re.compile(r"(?<!\\)(?:\$|\\\(|\\\[)")
# Surroundings of a marked answer: spaces, Markdown, a currency sign.
EDGES = re.compile(r"^[\s*_`€£¥]+|[\s*_`]+$")
BRACE = re.compile(r"(?<!\\)[{}]")
# Shortcut of `can_read`: math-verify always finds an answer in a letter or digit between dollars,
# or in a box.
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
    """1 if the completion's final answer equals the reference answer, else 0.

    The final answer is the text after the last `####` (GSM8K), unless this text is a heading or a
    box follows. Without `####` math-verify extracts a box, a formula or the last number; several
    boxes in a row are the members of a set. With `boxed` only `####` or boxes count, the last box
    or several in a row: reasoning that stops at the right number is no answer. With `only_finished`
    a completion cut at the length limit has no answer.

    A completion is wrong if it has no final answer, or one that takes too long to evaluate. When
    the call runs out of time, the remaining completions get no score. Raises ValueError for a
    reference answer that cannot be parsed.
    """
    deadline = running_time() + SHARE_OF_TIME * reward_timeout
    # Once per distinct reference: all completions of a prompt share one.
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
    """Whether a reference answer can be compared with; most are recognised without parsing."""
    readings = _readings(str(answer))
    return any(map(FORMULA.search, readings)) or any(map(parse, readings))


def _found(completion: str, *, boxed: bool) -> list[Any]:
    """Parse the final answer by math-verify; an answer after `####` is read like a reference."""
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
    """Result of `call`, which has a time-out; it is called again if the process was stopped."""
    # SIGALRM counts the time in which the job was suspended, so the first call may have timed out.
    stopped, result = stopped_time(), call()
    return call() if stopped_time() > stopped else result


def _readings(answer: str) -> tuple[str, ...]:
    """Texts in which to look for the reference answer, in order of preference."""
    marked = _marked_answer(answer)
    final = (answer if marked is None else marked).strip()
    if DELIMITER.search(final):
        return (final,)
    # math-verify looks for formulas between dollars: in a bare x^2 + 1 it finds only the 1, and in
    # prose between dollars it multiplies the letters.
    formula = f"${final}$"
    return (final, formula) if WORD.search(TEXT.sub("", final)) else (formula, final)


def _marked_answer(text: str) -> str | None:
    """First line after the last `####`; None without one, or if the line is a heading."""
    *before, tail = MARKER.split(text)
    line, _, below = tail.strip().partition("\n")
    is_heading = "\\boxed" in below or (below and HEADING.match(line))
    return line if before and not is_heading else None


def _last_boxes(text: str) -> str:
    """The last box, or the last boxes in a row as one box; empty without a box, or if it is open.

    math-verify joins boxes less than 10 characters apart, or 70 with an "and", "or", comma or
    semicolon between them. It would take a `\\fbox` for a box.
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
