"""Write the demo's data: every sum of two numbers from 1 to 9, one JSON object per line.

python -m demo.make_sums data/sums.jsonl
"""

import argparse
import json
from pathlib import Path

NUMBERS = range(1, 10)


def sums() -> list[dict[str, str]]:
    """All 81 rows, ordered by their numbers; the trainer shuffles them."""
    return [
        {"prompt": f"What is {a} + {b}? Answer with only the number.", "answer": str(a + b)}
        for a in NUMBERS
        for b in NUMBERS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="file to write")
    out = parser.parse_args().out
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps(row) + "\n" for row in sums()), encoding="utf-8")


if __name__ == "__main__":
    main()
