"""Writes the tables of docs/compatibility.md: features of a run that exclude each other, and what a
test of two others compares.

    PYTHONPATH=.:tests python docs/make_compatibility.py

A row has the conflicts of a feature, of the features that it needs, and of those it is a kind of.
"""

from pathlib import Path

from pairs.features import ROWS, UNTRIED, Kind, exclude, implied

PAGE = Path(__file__).with_name("compatibility.md")
BEGIN = "| feature | refused with |\n|---|---|\n"
PAIRS = """
### Tests of two together

`tests/pairs` has a test for each pair that the table allows: a few steps of a tiny model. What they
must equal depends on the kinds of the two features: of two kinds, the one further down counts. CI
runs some of them, and `pytest -m slow tests/pairs` the others.

| kind | features | equal to | test |
|---|---|---|---|
"""
KINDS: dict[Kind, tuple[str, str]] = {
    "value": ("a float64 oracle of two steps that has both", "test_trained_pairs.py"),
    "arrangement": (
        "a run without it, bit for bit, or to 1e-5 where it reorders sums",
        "test_trained_pairs.py",
    ),
    "rollout": ("a replay of its samples without it", "test_runs.py"),
}


def shortened(features: list[str]) -> list[str]:
    """The features without those that imply another one, and with a kind in place of its members.

    With `rollout.quantization` refused, so is `rollout.quantization_aware`, a kind of it.
    """
    names = [name for name in features if not {*implied(name)} & {*features} - {name}]
    for kind in ("lora.r", "train.offload"):
        members = [name for name, row in ROWS.items() if kind in row.also]
        if {*members} <= {*names}:
            names[names.index(members[0])] = kind
            names = [name for name in names if name not in members]
    return names


def table() -> str:
    """A row for each feature that excludes others."""
    excluded = {
        feature: shortened([other for other in ROWS if exclude(feature, other)]) for feature in ROWS
    }
    rows = [f"| `{name}` | `{'`, `'.join(all_)}` |\n" for name, all_ in excluded.items() if all_]
    return BEGIN + "".join(rows)


def kinds() -> str:
    """A row for each kind of features."""
    of_kind = {kind: [f"`{n}`" for n, row in ROWS.items() if row.kind == kind] for kind in KINDS}
    rows = [
        f"| {kind} | {', '.join(of_kind[kind])} | {equal} | `{test}` |\n"
        for kind, (equal, test) in KINDS.items()
    ]
    untried = "; ".join(f"`{a}` with `{b}` ({why})" for (a, b), why in UNTRIED.items())
    return f"{PAIRS}{''.join(rows)}\nNot tried: {untried}.\n"


def page() -> str:
    """The text of docs/compatibility.md, with the present tables."""
    return PAGE.read_text(encoding="utf-8").partition(BEGIN)[0] + table() + kinds()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
