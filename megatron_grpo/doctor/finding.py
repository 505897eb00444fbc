"""One line of the doctor's report."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "missing"]
"""`missing`: training cannot start; `warning`: it can, but slower or less safely."""


@dataclass(frozen=True)
class Finding:
    """The result of one check, and what to do about it.

    `value` goes into bug reports: it never contains a path, a secret, or the name of a user or
    host.
    """

    section: str
    name: str
    status: Status
    value: str
    remedy: str = ""
    """The command that fixes it, shown unless the status is `ok`."""


def can_train(findings: Iterable[Finding]) -> bool:
    """Whether nothing is missing that training needs."""
    return all(finding.status != "missing" for finding in findings)
