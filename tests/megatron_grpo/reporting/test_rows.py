import json
from pathlib import Path

import pytest

from megatron_grpo.reporting import rows
from megatron_grpo.reporting.rows import (
    least_rows,
    newest_rows,
    row_with,
    rows_of,
    rows_since,
    steps_of_prompt,
)


def line(step: int, sample: int, text: str = "") -> str:
    row = {"step": step, "prompt_index": step % 3, "sample_index": sample, "completion": text}
    return json.dumps(row) + "\n"


def found(path: Path, first: int, last: int | None = None) -> list[tuple[int, int]]:
    decoded = map(json.loads, rows_of(path, first, first if last is None else last))
    return [(row["step"], row["sample_index"]) for row in decoded]


@pytest.mark.parametrize("lengths", [[1, 50_000, 3], [3_000_000, 2], [0]], ids=str)
def test_every_step_is_found_whole_and_a_missing_one_is_empty(
    tmp_path: Path, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if lengths == [0]:  # short enough to be bisected to the last byte
        monkeypatch.setattr(rows, "NEAR", 0)
    path = tmp_path / "rows.jsonl"
    steps = [1, 2, 4, 5, 9]
    count = {step: 1 + step % 3 for step in steps}
    path.write_text(
        "".join(
            line(step, k, "x" * lengths[(step + k) % len(lengths)])
            for step in steps
            for k in range(count[step])
        )
    )
    for step in range(11):
        assert found(path, step) == [(step, k) for k in range(count.get(step, 0))]
    assert [step for step, k in found(path, 3, 8) if k == 0] == [4, 5]


def test_an_unfinished_line_is_not_there_yet(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert found(path, 1) == []  # no file, either
    path.write_text(line(1, 0) + line(2, 0) + line(2, 1)[:-1])
    assert found(path, 2) == [(2, 0)]
    path.write_text(line(1, 0) + line(2, 0)[:12])
    assert found(path, 2) == []
    assert found(path, 1) == [(1, 0)]
    assert [json.loads(row)["step"] for row in newest_rows(path, 10**6)] == [1]


def test_the_least_rows_of_all_steps_are_found_the_earliest_first(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(line(step, k) for step in (1, 2, 3) for k in range(3)))
    keys = {0: 5.0, 1: 4.0, 2: None}
    rows = least_rows(path, 4, lambda row: keys[row["sample_index"]])
    assert [(row["step"], row["sample_index"]) for row in rows] == [(1, 1), (2, 1), (3, 1), (1, 0)]


def test_lines_without_a_step_belong_to_the_step_before(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    event = '{{"name": "{}", "args": {}}},\n'
    lines = ["[\n", event.format("row", "{}")]
    for step in (1, 2, 3):
        lines += [event.format("a", f'{{"step": {step}}}'), event.format(f"beside{step}", "{}")]
    path.write_text("".join(lines))
    names = [json.loads(row)["name"] for row in rows_of(path, 2, 2)]
    assert names == ["a", "beside2"]
    assert next(rows_of(path, 0, 9)).startswith(b'{"name": "row"')


@pytest.mark.parametrize(
    ("num_bytes", "steps"), [(10**6, [1, 2, 3]), (560, [2, 3]), (300, [3]), (10, [3])]
)
def test_the_newest_steps_are_whole_and_at_least_one(
    tmp_path: Path, num_bytes: int, steps: list[int]
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(line(step, k) for step in (1, 2, 3) for k in range(3)))
    newest = [json.loads(row) for row in newest_rows(path, num_bytes)]
    assert [(row["step"], row["sample_index"]) for row in newest] == [
        (step, k) for step in steps for k in range(3)
    ]


def test_a_row_and_the_steps_of_a_prompt_are_found(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(line(step, k, f"{step}.{k}") for step in range(1, 8) for k in (0, 1)))
    row = row_with(path, (5, 2, 1))
    assert row is not None and json.loads(row)["completion"] == "5.1"
    assert row_with(path, (5, 2, 2)) is None
    assert steps_of_prompt(path, 1) == [1, 4, 7]


def test_metrics_come_once_but_for_the_last_which_may_grow(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first, second = line(1, 0), line(2, 0)
    path.write_text(first + second)
    offset, news, starts_again = rows_since(path, 0, -1)
    assert (len(news), starts_again) == (2, True)
    path.write_text(first + line(2, 0, "evaluated later") + line(3, 0))
    offset, news, starts_again = rows_since(path, offset, 2)
    assert [json.loads(row)["step"] for row in news] == [2, 3] and not starts_again
    assert b"evaluated later" in news[0]
    assert rows_since(path, offset, 3) == (offset, news[1:], False)


def test_metrics_of_a_resumed_run_come_from_the_start(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(line(step, 0) for step in (1, 2, 3)))
    offset, _, _ = rows_since(path, 0, -1)
    path.write_text(line(1, 0) + line(2, 0, "repeated") + line(3, 0))
    _, news, starts_again = rows_since(path, offset, 3)
    assert len(news) == 3 and starts_again
    path.write_text("".join(line(step, 0) for step in (1, 2, 4)))  # another row at that place
    assert rows_since(path, offset, 3)[2]
    path.write_text(line(1, 0))
    assert rows_since(path, offset, 3) == (0, [line(1, 0).strip().encode()], True)
