"""Write the data of `configs/learn_tiny.yaml`: 64 prompts for each kind of characters.

python -m demo.make_kinds data/kinds.jsonl
"""

import argparse
import json
from pathlib import Path

KINDS = ("digits", "capitals")


def rows() -> list[dict[str, str]]:
    """All rows; a number makes each prompt unique."""
    return [
        {"prompt": f"{kind} {number}", "answer": kind} for number in range(64) for kind in KINDS
    ]


def write(out: Path) -> None:
    """Write the rows as JSON lines."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps(row) + "\n" for row in rows()), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="file to write")
    write(parser.parse_args().out)


if __name__ == "__main__":
    main()
