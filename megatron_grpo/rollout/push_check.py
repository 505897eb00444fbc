"""Checks that a push of weights has arrived: compares the workers' reports with what was sent."""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_grpo.rollout.engine_error import EngineError

WorkerSums = Mapping[str, int]
"""Checksums of the parameters of one worker, by name."""

NUM_NAMES_SHOWN = 8

Json = dict[str, Any]


def check_reports(
    base_urls: Sequence[str],
    reports: Sequence[Sequence[Json]],
    push: str,
    expected: Sequence[WorkerSums] | None,
) -> None:
    """Compare `PushWorker.push_report` of every worker of every engine with what was pushed.

    `expected` are the checksums of each worker; None if sending failed, when only the errors of the
    workers are of interest. Raises an EngineError that names engine, worker and parameters of every
    difference.
    """
    faults = [
        f"rollout engine {url} worker {rank}: {fault}"
        for url, workers in zip(base_urls, reports, strict=True)
        for rank, report in enumerate(workers)
        if (fault := _fault(report, push, expected[rank] if expected else None))
    ]
    if faults:
        raise EngineError("the push of new weights failed:\n  " + "\n  ".join(faults))


def _fault(report: Json, push: str, expected: WorkerSums | None) -> str:
    if report["push"] != push:
        return f"another trainer has connected to it (its push: {report['push'] or 'not begun'})"
    if not report["is_loaded"]:
        return str(report["error"] or "it has not loaded the weights")
    if expected is None:
        return ""
    sums: WorkerSums = report["sums"]
    differing = [name for name in {**expected, **sums} if expected.get(name) != sums.get(name)]
    if not differing:
        return ""
    shown = ", ".join(differing[:NUM_NAMES_SHOWN])
    more = f" and {rest} more" if (rest := len(differing) - NUM_NAMES_SHOWN) > 0 else ""
    return f"{len(differing)} of {len(sums)} parameters differ from what was pushed: {shown}{more}"
