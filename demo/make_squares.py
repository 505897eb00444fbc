"""Write the data of `configs/learn_colours.yaml`: squares, each on a white image of its own size.

python -m demo.make_squares data/squares
"""

import argparse
import json
import random
from pathlib import Path

from PIL import Image

COLOURS = {"red": (220, 30, 30), "green": (30, 180, 30), "blue": (30, 30, 220)}
NUM_EACH = 32
SIDES = (56, 112)
"""Least and largest length of the sides of an image, in pixels."""


def write(folder: Path) -> Path:
    """Write the images and `rows.jsonl` to the folder; returns the path of the rows."""
    folder.mkdir(parents=True, exist_ok=True)
    draw, rows = random.Random(0), []
    for number in range(NUM_EACH):
        for name, colour in COLOURS.items():
            width, height = draw.randint(*SIDES), draw.randint(*SIDES)
            image = Image.new("RGB", (width, height), "white")
            side = draw.randint(min(width, height) // 2, min(width, height))
            left, top = draw.randint(0, width - side), draw.randint(0, height - side)
            image.paste(colour, (left, top, left + side, top + side))
            file = f"{name}_{number}.png"
            image.save(folder / file)
            rows.append({"prompt": "Which colour?", "image": file, "answer": name})
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder to write to")
    write(parser.parse_args().out)


if __name__ == "__main__":
    main()
