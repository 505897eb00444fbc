"""Collects all findings of this host."""

import os
from collections.abc import Iterator
from pathlib import Path

from megatron_grpo.doctor.finding import Finding
from megatron_grpo.doctor.gpus import Gpus, driver_version, judge_gpus, judge_loaded
from megatron_grpo.doctor.limits import judge_limits, read_limits
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
from megatron_grpo.doctor.storage import judge_storage, measure_storage
from megatron_grpo.doctor.surroundings import judge_surroundings


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
    from megatron_grpo.doctor.cuda import read_gpus  # torch: seconds, where there is no GPU

    return read_gpus(driver)


def _storage(run_dir: Path) -> Iterator[Finding]:
    try:
        yield from judge_storage(measure_storage(run_dir))
    except OSError as error:
        value = f"cannot be written: {error.strerror}"
        remedy = "set train.run_dir to a folder of yours"
        yield Finding("file system", "run directory", "missing", value, remedy)
