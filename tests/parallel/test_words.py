"""Words of messages."""

from parallel.words import counted


def test_counted_is_plural_except_for_one():
    assert [counted(number, "step") for number in (0, 1, 2000)] == [
        "0 steps",
        "1 step",
        "2,000 steps",
    ]
