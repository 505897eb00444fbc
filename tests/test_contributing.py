"""The model family that CONTRIBUTING.md shows is the file that tests of families prove correct."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_example_is_the_file_that_it_names():
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.S)
    name, _, code = block.partition("\n")
    assert code == (ROOT / name.removeprefix("# ")).read_text()
