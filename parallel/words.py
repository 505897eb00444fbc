"""Words of messages."""


def counted(number: int, noun: str) -> str:
    """`1 engine`, `2 engines`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
