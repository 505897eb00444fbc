"""Errors of users' Python files."""

from megatron_grpo.workers.user_file import MAX_TEXT, error_text


def retried() -> None:
    try:
        raise OSError("refused " * (MAX_TEXT // 8))
    except OSError as error:
        raise LookupError("no score") from error


def test_error_text_keeps_the_line_that_raised():
    try:
        retried()
    except LookupError as error:
        text = error_text(error, "a limit")
    assert text.startswith("Traceback (most recent call last):")
    assert "in retried" in text and text.endswith("LookupError: no score")
    assert "OSError: refused" not in text
