import json
import subprocess
import sys
from pathlib import Path

from demo.make_sums import sums

REPOSITORY = Path(__file__).parents[2]


def test_every_sum_of_two_digits_is_there_once_with_its_answer():
    rows = sums()
    assert len({row["prompt"] for row in rows}) == len(rows) == 81
    assert {"prompt": "What is 9 + 4? Answer with only the number.", "answer": "13"} in rows


def test_the_file_is_the_same_every_time(tmp_path):
    for name in ("first/sums.jsonl", "second/sums.jsonl"):
        command = [sys.executable, "demo/make_sums.py", str(tmp_path / name)]
        subprocess.run(command, check=True, cwd=REPOSITORY, timeout=30)
    first = (tmp_path / "first/sums.jsonl").read_text()
    assert first == (tmp_path / "second/sums.jsonl").read_text()
    assert [json.loads(line) for line in first.splitlines()] == sums()
