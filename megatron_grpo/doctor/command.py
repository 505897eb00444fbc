"""The command `megatron-grpo doctor`: examine, compare hosts, print for people and bug reports."""

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_grpo.config.config import Config
from megatron_grpo.doctor.gpus import check_gpus, check_transformer_engine, find_gpus
from megatron_grpo.doctor.host import (
    Check,
    can_train,
    check_environment,
    check_limits,
    check_network,
    check_storage,
    measure_storage,
    read_limits,
)
from megatron_grpo.doctor.packages import (
    TRANSFORMER_ENGINE,
    Wanted,
    check_packages,
    declared_requirements,
    installed_versions,
)
from megatron_grpo.launch.launch import RankPlace
from parallel.words import counted

if TYPE_CHECKING:
    from torch.distributed import Store

ALIKE = ("packages", "GPUs")
"""Sections that must be the same on all hosts."""
MAX_SKEW_SECONDS = 1.0
"""Above this, logs of several hosts cannot be read side by side."""
TIMEOUT = timedelta(seconds=600)
"""Generous: on a shared file system, a first start with cold caches takes minutes per host."""
STYLES = {"ok": "green", "not needed": "dim", "warning": "yellow", "missing": "bold red"}


@dataclass(frozen=True)
class HostReport:
    """Checks of one host, and its clock (`time.time`) once all hosts were examined."""

    host: str
    checks: tuple[Check, ...]
    clock: float = 0.0


def diagnose(cfg: Config | None, place: RankPlace | None, *, as_report: bool) -> bool:
    """Examine this host, or all hosts of `place`'s job, and print the findings.

    `as_report`: also print all checks as a block for bug reports. Returns whether training can
    start on all hosts; ranks other than 0 print nothing and return True. Raises ValueError if not
    all ranks join.
    """
    run_dir = cfg.train.run_dir if cfg else Path()
    if place is None:
        reports = [HostReport("here", tuple(examine(run_dir, _wanted(cfg))))]
    else:
        store = _join_store(place)
        if place.local_rank > 0:
            return True
        reports = gather(store, place, tuple(examine(run_dir, _wanted(cfg))))
        if place.rank > 0:
            return True
    common = [check_clocks(reports), *compare_hosts(reports)]
    show(reports, common)
    if as_report:
        print("\nFor a bug report (no names of users or hosts, no paths, no secrets):\n")
        print(markdown(reports, common))
    else:
        print("For a bug report, and to see every check: the same command with --report")
    return all(can_train(report.checks) for report in reports)


def _wanted(cfg: Config | None) -> Wanted:
    if cfg is None:
        return Wanted()
    local = cfg.model.dtype == "float32" or cfg.model.megatron.get("transformer_impl") == "local"
    rollout = cfg.rollout
    engine = "" if rollout.base_urls or cfg.train.replay is not None else rollout.engine
    return Wanted(
        vllm=engine == "vllm",
        sglang=rollout.python or Path(sys.executable) if engine == "sglang" else None,
        trackers=cfg.trackers,
        transformer_engine=not local,
    )


def examine(run_dir: Path, wanted: Wanted) -> Iterator[Check]:
    """All checks of this host, for runs in `run_dir`. Takes a few seconds, mostly for the disk."""
    gpus = find_gpus()
    on_gpu = gpus is not None
    declared = declared_requirements()
    versions = installed_versions(declared)
    yield from check_packages(declared, versions, on_gpu, wanted)
    yield from check_gpus(gpus)
    if on_gpu and wanted.transformer_engine and TRANSFORMER_ENGINE in versions:
        yield from check_transformer_engine()
    yield from check_network(on_gpu)
    yield from check_limits(read_limits(), on_gpu)
    try:
        yield from check_storage(measure_storage(run_dir))
    except OSError as error:
        value = f"cannot be written: {error.strerror}"
        remedy = "set train.run_dir to a folder of yours"
        yield Check("file system", "run directory", "missing", value, remedy)
    yield from check_environment(os.environ, on_gpu)


def _join_store(place: RankPlace) -> "Store":
    """The store of all ranks, at the launcher's address. Raises ValueError if not all join."""
    # Else torch logs pages if hosts do not meet, around our one line.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    from torch.distributed import DistError, rendezvous  # torch: seconds, see cli.py

    try:
        store, _, _ = next(rendezvous("env://", place.rank, place.world_size, timeout=TIMEOUT))
    except DistError as error:
        raise ValueError(
            f"the {place.world_size} ranks did not meet at MASTER_ADDR and MASTER_PORT in "
            f"{TIMEOUT.seconds} s: is the first host's name right and the port open? {error}"
        ) from None
    return store


def gather(
    store: "Store",
    place: RankPlace,
    checks: Sequence[Check],
    now: Callable[[], float] = time.time,
) -> list[HostReport]:
    """The reports of all hosts, on rank 0; other hosts get an empty list.

    Called by one rank per host.
    """
    # The last host wakes the others, so that all read their clocks within milliseconds.
    ticket = store.add("doctor/examined", 1)
    if ticket == place.num_hosts:
        store.set("doctor/read_clocks", "")
    store.wait(["doctor/read_clocks"])
    clock = now()
    report = [place.rank, socket.gethostname(), [asdict(check) for check in checks], clock]
    store.set(f"doctor/{ticket}", json.dumps(report))
    if place.rank > 0:
        return []
    reports = [json.loads(store.get(f"doctor/{one}")) for one in range(1, place.num_hosts + 1)]
    return [
        HostReport(host, tuple(Check(**row) for row in rows), clock)
        for _, host, rows, clock in sorted(reports, key=lambda report: report[0])
    ]


def check_clocks(reports: Sequence[HostReport]) -> Check:
    """The largest clock difference between any two hosts."""
    if len(reports) == 1:
        return Check("hosts", "clock skew", "ok", "one host: nothing to compare with")
    clocks = [report.clock for report in reports]
    skew = max(clocks) - min(clocks)
    value = f"{skew * 1e3:,.1f} ms between {len(reports)} hosts"
    remedy = "chronyc tracking, on every host"
    return Check.warn_if(skew > MAX_SKEW_SECONDS, "hosts", "clock skew", value, remedy)


def compare_hosts(reports: Sequence[HostReport]) -> Iterator[Check]:
    """A warning per package or GPU that differs from host 0: ranks might compute differently."""
    own = {(one.section, one.name): one.value for one in reports[0].checks}
    hosts: dict[tuple[str, str, str], list[str]] = {}
    for number, report in enumerate(reports):
        for one in report.checks:
            if one.section in ALIKE and own.get((one.section, one.name)) != one.value:
                hosts.setdefault((one.section, one.name, one.value), []).append(str(number))
    for (section, name, value), numbers in hosts.items():
        some = ", ".join(numbers[:3]) + (", ..." if len(numbers) > 3 else "")
        here = own.get((section, name), "not there")
        value = f"{value} on {len(numbers)} of {len(reports)} hosts ({some}), {here} on host 0"
        yield Check("hosts", f"{name} differs", "warning", value, "start all from one image")


def show(reports: Sequence[HostReport], common: Sequence[Check]) -> None:
    """Print the tables and the verdict."""
    # No markup: it would swallow [gpu] in a command. A log file has no terminal width: use 160.
    width = None if sys.stdout.isatty() else 160
    console = Console(markup=False, emoji=False, highlight=False, width=width)
    console.print(_checks_table([*reports[0].checks, *common]))
    if len(reports) > 1:
        console.print(_hosts_table(reports))
    everything = [check for report in reports for check in report.checks]
    console.print(_verdict([*everything, *common]))


def _checks_table(checks: Sequence[Check]) -> Table:
    """A row per problem, the worst first; then a row per section of passed checks."""
    table = Table("", "what", "found", "how to fix it", title="this host", title_justify="left")
    problems = [check for check in checks if check.is_problem]
    for check in sorted(problems, key=lambda check: check.status == "warning"):
        table.add_row(_colored(check.status), check.name, check.value, check.remedy)
    if problems:
        table.add_section()
    well = [check for check in checks if check.status == "ok"]
    for section, group in groupby(well, key=lambda check: check.section):
        first, *others = group
        more = f"; {len(others)} more" if others else ""
        table.add_row(_colored("ok"), section, f"{first.name}: {first.value}{more}", "")
    if unneeded := [check.name for check in checks if check.status == "not needed"]:
        table.add_row(_colored("not needed"), "not installed", ", ".join(unneeded), "")
    return table


def _colored(status: str) -> Text:
    return Text(status, STYLES[status])


def _hosts_table(reports: Sequence[HostReport]) -> Table:
    """A row per host: its clock, its disk, and the names of checks that are not ok."""
    table = Table("host", "clock, ms", "GPUs", "run directory", "problems", title="all hosts")
    for number, report in enumerate(reports):
        values = {check.name: check.value for check in report.checks}
        problems = [check for check in report.checks if check.is_problem]
        table.add_row(
            f"{number} {report.host}",
            f"{(report.clock - reports[0].clock) * 1e3:+.1f}",
            values.get("GPUs", ""),
            values.get("run directory", ""),
            Text(", ").join(Text(check.name, STYLES[check.status]) for check in problems),
        )
    return table


def _verdict(checks: Sequence[Check]) -> str:
    """One sentence: whether training can start, or else what is missing."""
    num_warnings = sum(check.status == "warning" for check in checks)
    warnings = counted(num_warnings, "warning")
    if can_train(checks):
        return f"Training can start here; {warnings}."
    missing = dict.fromkeys(check.name for check in checks if check.status == "missing")
    return f"Training cannot start here: {', '.join(missing)} missing; {warnings}."


def markdown(reports: Sequence[HostReport], common: Sequence[Check]) -> str:
    """A table of all checks of host 0 and, of the other hosts, of their problems."""
    rows = [("0", check) for check in reports[0].checks]
    for number, report in enumerate(reports[1:], 1):
        rows += [(str(number), check) for check in report.checks if check.is_problem]
    rows += [("all", check) for check in common]
    cells = [(where, check.status, check.name, check.value) for where, check in rows]
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in cells]
    lines = [f"| {' | '.join(row)} |" for row in escaped]
    head = f"<details><summary>megatron-grpo doctor, {counted(len(reports), 'host')}</summary>"
    titles = ["| host | status | what | found |", "|---|---|---|---|"]
    return "\n".join([head, "", *titles, *lines, "", "</details>"])
