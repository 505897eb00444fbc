"""One line of the doctor's report."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "missing"]
"""`missing`: training cannot start without it; `warning`: it can, slower or less safely."""


@dataclass(frozen=True)
class Finding:
    """What was found of one thing, and what to do about it.

    `value` goes into bug reports: it never holds a path, the name of a user or host, or a secret.
    """

    section: str
    name: str
    status: Status
    value: str
    remedy: str = ""
    """The command that mends it, shown unless all is well."""


def can_train(findings: Iterable[Finding]) -> bool:
    """Whether nothing is missing that training needs."""
    return all(finding.status != "missing" for finding in findings)
