"""Lines of a plan's output: tables, and blocks with one fact a line."""

from collections.abc import Container, Iterable, Sequence

AXES = {
    "tp": "tensor",
    "pp": "pipeline",
    "vp": "virtual_pipeline",
    "cp": "context",
    "dp": "data",
    "ep": "expert",
}


def table(rows: Sequence[Sequence[str]], left: Container[int] = ()) -> list[str]:
    """Pad cells to columns, aligned to the left in columns `left`; the first row is the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = ["<" if number in left else ">" for number in range(len(widths))]
    return [
        "  ".join(
            f"{cell:{side}{width}}" for cell, side, width in zip(row, aligned, widths, strict=True)
        ).rstrip()
        for row in rows
    ]


def facts(title: str, rows: Iterable[tuple[str, str]]) -> list[str]:
    """A title, and a line for each (number, words)."""
    return [title, *(f"{number:>12}  {words}" for number, words in rows)]


def legend(columns: Container[str]) -> str:
    """The keys of the sizes among `columns`."""
    axes = [name for name in AXES if name in columns]
    keys = ",".join(AXES[name] for name in axes)
    return f"{', '.join(axes)}: parallel.{{{keys}}}_parallel_size"
