"""The command `megatron-grpo doctor`: examine, gather, and print for people and bug reports."""

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_grpo.config.config import Config
from megatron_grpo.doctor.finding import Finding, can_train
from megatron_grpo.doctor.gpus import Gpus, driver_version, judge_gpus, judge_loaded, read_gpus
from megatron_grpo.doctor.host import (
    judge_limits,
    judge_storage,
    judge_surroundings,
    measure_storage,
    read_limits,
)
from megatron_grpo.doctor.hosts import HostReport, differing, judge_clocks
from megatron_grpo.doctor.network import (
    can_load,
    judge_interfaces,
    judge_own_name,
    judge_ports,
    own_address,
    read_interfaces,
    read_ports,
)
from megatron_grpo.doctor.packages import (
    TRANSFORMER_ENGINE,
    Wanted,
    installed,
    judge_packages,
    names_of_interest,
    requirements,
)
from megatron_grpo.launch.launch import RankPlace


def examine(run_dir: Path, wanted: Wanted) -> Iterator[Finding]:
    """Findings of this host, for runs in `run_dir`. Takes a few seconds, mostly for the disk."""
    gpus = _gpus()
    on_gpu = gpus is not None
    declared = requirements()
    versions = installed(names_of_interest(declared))
    yield from judge_packages(declared, versions, on_gpu, wanted)
    yield from judge_gpus(gpus)
    if on_gpu and wanted.transformer_engine and TRANSFORMER_ENGINE in versions:
        yield from judge_loaded()
    verbs, library = Path("/dev/infiniband").is_dir(), can_load("libibverbs.so.1")
    yield from judge_ports(read_ports(), verbs, library, on_gpu)
    yield judge_interfaces(read_interfaces())
    yield judge_own_name(os.environ, own_address(), on_gpu)
    yield from judge_limits(read_limits(), on_gpu)
    yield from _storage(run_dir)
    yield from judge_surroundings(os.environ, on_gpu)


def _gpus() -> Gpus | None:
    driver = driver_version()
    if driver is None:
        return None
    # Without torch there is nothing to ask; judge_packages reports that it is missing.
    if not installed(["torch"]):
        return Gpus(driver, "not installed", None, None, (), ())
    return read_gpus(driver)


def _storage(run_dir: Path) -> Iterator[Finding]:
    try:
        yield from judge_storage(measure_storage(run_dir))
    except OSError as error:
        value = f"cannot be written: {error.strerror}"
        remedy = "set train.run_dir to a folder of yours"
        yield Finding("file system", "run directory", "missing", value, remedy)


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


def diagnose(cfg: Config | None, place: RankPlace | None) -> bool:
    """Examine this host, or all hosts of the job that `place` belongs to, and print the findings.

    Returns whether training can start on all of them; ranks other than 0 print nothing and return
    True. Raises ValueError if the hosts do not meet.
    """
    run_dir = cfg.train.run_dir if cfg else Path()
    if place is None:
        reports = [HostReport("here", tuple(examine(run_dir, _wanted(cfg))))]
    else:
        # If hosts do not meet, our message is one line, while torch would log pages.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
        from megatron_grpo.doctor.gathering import gather, meet  # torch: seconds, see cli.py

        store = meet(place)
        findings = tuple(examine(run_dir, _wanted(cfg))) if place.local_rank == 0 else ()
        reports = gather(store, place, findings)
        if place.rank > 0:
            return True
    common = [judge_clocks(reports), *differing(reports)]
    show(reports, common)
    return all(can_train(report.findings) for report in reports)


def _wanted(cfg: Config | None) -> Wanted:
    if cfg is None:
        return Wanted()
    local = cfg.model.dtype == "float32" or cfg.model.megatron.get("transformer_impl") == "local"
    return Wanted(
        vllm=cfg.rollout.engine == "vllm" and not cfg.rollout.base_urls,
        wandb=cfg.wandb.project is not None,
        transformer_engine=not local,
    )
