"""docs/peers.md is generated, and gives no factor where it would mislead."""

import importlib
import json

import pytest

from peers_page import CHANGED, COMPARISONS, PAGE, RESULTS, factors_of, method_of, render


def result(**changes):
    """One comparison, in which the other side takes twice the time and four times the memory."""
    return {
        "title": "Sums",
        "settings": {"other": "its default"},
        "requirements": {"other": ["other==1.0"]},
        "goals": [["seconds", "other", 1.5], ["peak_bytes", "best", 5.0]],
        "work": ["memcpy", 4e9],
        "figures": {
            "ours": [{"seconds": 1.0, "peak_bytes": 10}, {"seconds": 1.2, "peak_bytes": 10}],
            "other": [{"seconds": 2.0, "peak_bytes": 40}, {"seconds": 2.4, "peak_bytes": 40}],
        },
        "others": 0.1,
        "agreement": {"other": "bit for bit"},
        "load": 0.2,
        "threads": 2,
        "ceilings": {"memcpy": 8.0},
        "date": "2026-01-01",
        "processor": "2 x CPU",
        "versions": {"Python": "3.12", "torch": "2.13"},
        "method": method_of("packing"),
    } | changes


def test_the_page_equals_the_results():
    assert PAGE.read_text() == render(json.loads(RESULTS.read_text()))


def test_the_requirement_files_equal_the_comparisons_packages():
    """Files for people and for tools that look for outdated pins; each is installed by itself."""
    files = {
        tuple(path.read_text().split()) for path in (COMPARISONS / "requirements").glob("*.txt")
    }
    names = [path.stem for path in COMPARISONS.glob("*.py")]
    modules = [importlib.import_module(f"peers.{name}") for name in names]
    assert files == {tuple(pins) for each in modules for pins in each.REQUIREMENTS.values() if pins}


def test_factors_are_formed_round_by_round_and_goals_are_judged():
    page = render({"packing": result()})
    assert "| Sums | seconds | other | 2 | 1.5: met |" in page
    assert "|  | peak_bytes | the best of 1 | 4 | 5: **not met** |" in page
    assert "other==1.0; its default; bit for bit." in page
    assert "2 threads, Python 3.12, torch 2.13. Load at the start 0.20;" in page
    assert "The work takes at least 0.5 s at the ceiling of memcpy." in page


def test_results_of_another_method_are_marked():
    assert CHANGED not in render({"packing": result()})
    assert CHANGED in render({"packing": result(method="of old")})


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"load": 1.6}, "load 1.6"),
        ({"others": 0.7}, "other processes took 0.7 cores"),
        (
            {
                "figures": {
                    "ours": [{"seconds": 1.0, "peak_bytes": 10}] * 2,
                    "other": [{"seconds": s, "peak_bytes": 40} for s in (2.0, 3.2)],
                }
            },
            "spread 1.6x",
        ),
    ],
)
def test_unreliable_seconds_give_no_factor_but_counts_do(changes, reason):
    page = render({"packing": result(**changes)})
    assert f"**no number: {reason}**" in page
    assert "| Sums | seconds | other | no number | 1.5 |" in page
    assert factors_of(result(**changes), "other", "peak_bytes") == [4.0, 4.0]


def test_the_range_of_a_factor_includes_our_own_seconds():
    ours, other = (
        [{"seconds": s, "peak_bytes": 10} for s in seconds] for seconds in ((0.5, 1.0), (2.0, 2.0))
    )
    page = render({"packing": result(figures={"ours": ours, "other": other})})
    assert "| Sums | seconds | other | 3 (2 to 4) | 1.5: met |" in page


def test_different_outputs_give_no_number():
    differing = result(agreement={"other": "differs: 3 of 4 tensors"})
    assert factors_of(differing, "other", "peak_bytes") is None
    assert "differs: 3 of 4 tensors" in render({"packing": differing})


def test_a_count_of_0_is_no_divisor():
    ours, other = ([{"seconds": 1.0, "peak_bytes": count}] * 2 for count in (0, 40))
    found = result(figures={"ours": ours, "other": other})
    assert factors_of(found, "other", "peak_bytes") is None
    assert "| peak_bytes | 0 | 40; **ours is 0** |" in render({"packing": found})
