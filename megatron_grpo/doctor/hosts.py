"""Comparison of the hosts of a job: clocks, packages, GPUs."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_grpo.doctor.finding import Finding

SECTION = "hosts"
ALIKE = ("packages", "GPUs")
"""Sections that must be the same on all hosts."""
MAX_SKEW_SECONDS = 1.0
"""Above this, logs of several hosts cannot be read side by side."""


@dataclass(frozen=True)
class HostReport:
    """The findings of one host."""

    host: str
    findings: tuple[Finding, ...]
    ahead: float = 0.0
    """Seconds that its clock is ahead of rank 0's."""
    uncertainty: float = 0.0
    """Plus or minus seconds: half the round-trip time of a message."""


def judge_clocks(reports: Sequence[HostReport]) -> Finding:
    """The largest clock difference between any two hosts."""
    if len(reports) == 1:
        return Finding(SECTION, "clock skew", "ok", "one host: nothing to compare with")
    latest = max(reports, key=lambda report: report.ahead)
    earliest = min(reports, key=lambda report: report.ahead)
    skew, error = latest.ahead - earliest.ahead, latest.uncertainty + earliest.uncertainty
    value = f"{skew * 1e3:,.1f} ms between {len(reports)} hosts, give or take {error * 1e3:,.1f} ms"
    if skew - error > MAX_SKEW_SECONDS:
        return Finding(SECTION, "clock skew", "warning", value, "chronyc tracking, on every host")
    return Finding(SECTION, "clock skew", "ok", value)


def differing(reports: Sequence[HostReport]) -> Iterator[Finding]:
    """Packages and GPUs that differ from host 0, so that ranks might compute differently."""
    own = {(one.section, one.name): one.value for one in reports[0].findings}
    others = defaultdict[tuple[str, str, str], list[str]](list)
    for number, report in enumerate(reports):
        for one in report.findings:
            if one.section in ALIKE and own.get((one.section, one.name)) != one.value:
                others[one.section, one.name, one.value].append(str(number))
    for (section, name, value), numbers in others.items():
        some = ", ".join(numbers[:3]) + (", ..." if len(numbers) > 3 else "")
        here = own.get((section, name), "not there")
        value = f"{value} on {len(numbers)} of {len(reports)} hosts ({some}), {here} on host 0"
        yield Finding(SECTION, f"{name} differs", "warning", value, "start all from one image")
