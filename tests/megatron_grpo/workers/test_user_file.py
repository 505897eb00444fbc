"""Users' Python files: their modules and errors."""

import pickle

from megatron_grpo.workers.user_file import MAX_TEXT, error_text, load_named


def test_objects_of_files_of_one_name_can_be_pickled(tmp_path):
    classes = []
    for folder in ("a", "b"):
        file = tmp_path / folder / "mine.py"
        file.parent.mkdir()
        file.write_text("class Mine: ...\n")
        classes.append(load_named(f"{file}:Mine", "file"))
    for each in classes:
        assert type(pickle.loads(pickle.dumps(each()))) is each


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
