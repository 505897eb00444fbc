import json
from pathlib import Path

import pytest

from megatron_grpo.reporting.records import rows_of_step


@pytest.mark.parametrize("unfinished", ["", '{"step": 9, "text": "xx'])
def test_the_rows_of_a_step_are_found_wherever_they_are(tmp_path: Path, unfinished: str) -> None:
    rows = [
        {"step": step, "text": "x" * length}
        for step, lengths in {2: [0, 5000, 1], 3: [7], 5: [0, 0, 90_000], 9: [3]}.items()
        for length in lengths
    ]
    path = tmp_path / "completions.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows) + unfinished)
    for step in range(11):
        assert rows_of_step(path, step) == [row for row in rows if row["step"] == step]


def test_a_file_that_is_empty_or_missing_has_no_rows(tmp_path: Path) -> None:
    assert rows_of_step(tmp_path / "tokens.jsonl", 1) == []
    (tmp_path / "tokens.jsonl").touch()
    assert rows_of_step(tmp_path / "tokens.jsonl", 1) == []
