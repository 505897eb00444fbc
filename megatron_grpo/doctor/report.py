"""The doctor's output: tables for people, and a block for bug reports."""

import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_grpo.doctor.finding import Finding, can_train
from megatron_grpo.doctor.hosts import HostReport

STYLES = {"ok": "green", "warning": "yellow", "missing": "bold red"}


def findings_table(findings: Iterable[Finding]) -> Table:
    """A row per finding, a rule between sections."""
    table = Table("", "what", "found", "how to fix it", title="this host", title_justify="left")
    section = None
    for finding in findings:
        if section not in (None, finding.section):
            table.add_section()
        section = finding.section
        remedy = "" if finding.status == "ok" else finding.remedy
        table.add_row(_colored(finding), finding.name, finding.value, remedy)
    return table


def hosts_table(reports: Sequence[HostReport]) -> Table:
    """A row per host: its clock, its disk, and the names of findings that are not ok."""
    table = Table("host", "clock, ms", "GPUs", "run directory", "problems", title="all hosts")
    for number, report in enumerate(reports):
        values = {finding.name: finding.value for finding in report.findings}
        unwell = [finding for finding in report.findings if finding.status != "ok"]
        table.add_row(
            f"{number} {report.host}",
            f"{report.ahead * 1e3:+.1f}",
            values.get("GPUs", ""),
            values.get("run directory", ""),
            Text(", ").join(_named(finding) for finding in unwell) if unwell else "",
        )
    return table


def markdown(reports: Sequence[HostReport], common: Sequence[Finding]) -> str:
    """A table to paste into a bug report, without names of users or hosts and without paths.

    It has all findings of host 0, and of the other hosts, which are numbered, those that are not
    ok.
    """
    rows = [("0", finding) for finding in reports[0].findings]
    for number, report in enumerate(reports[1:], 1):
        rows += [(str(number), one) for one in report.findings if one.status != "ok"]
    rows += [("all", finding) for finding in common]
    lines = [
        f"| {where} | {finding.status} | {_cell(finding.name)} | {_cell(finding.value)} |"
        for where, finding in rows
    ]
    head = f"<details><summary>megatron-grpo doctor, {len(reports)} host(s)</summary>"
    titles = ["| host | status | what | found |", "|---|---|---|---|"]
    return "\n".join([head, "", *titles, *lines, "", "</details>"])


def verdict(findings: Sequence[Finding]) -> str:
    """One sentence: whether training can start, or else what is missing."""
    num_warnings = sum(finding.status == "warning" for finding in findings)
    warnings = f"{num_warnings} warning{'' if num_warnings == 1 else 's'}"
    if can_train(findings):
        return f"Training can start here; {warnings}."
    missing = dict.fromkeys(one.name for one in findings if one.status == "missing")
    return f"Training cannot start here: {', '.join(missing)} missing; {warnings}."


def show(reports: Sequence[HostReport], common: Sequence[Finding]) -> None:
    """Print the tables, the verdict and the block for bug reports."""
    # No markup: it would swallow [gpu] in a command. A log file has no terminal width: use 160.
    width = None if sys.stdout.isatty() else 160
    console = Console(markup=False, emoji=False, highlight=False, width=width)
    console.print(findings_table([*reports[0].findings, *common]))
    if len(reports) > 1:
        console.print(hosts_table(reports))
    everything = [finding for report in reports for finding in report.findings]
    console.print(verdict([*everything, *common]))
    print("\nFor a bug report (no names of users or hosts, no paths, no secrets):\n")
    print(markdown(reports, common))


def _colored(finding: Finding) -> Text:
    return Text(finding.status, style=STYLES[finding.status])


def _named(finding: Finding) -> Text:
    return Text(finding.name, style=STYLES[finding.status])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
