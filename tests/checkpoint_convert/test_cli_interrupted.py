"""Conversions interrupted in mid-copy leave nothing that looks finished, and no process."""

import errno
import json
import os
import re
import resource
import signal

import psutil
import pytest

from checkpoint_convert import hf_tensors, read_shape
from checkpoint_convert.formats.safetensors_file import create_file
from helpers.conversions import Command, run_cli

LARGE = {  # 539 MB: several shares, so that two workers copy at once
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "intermediate_size": 256,
    "vocab_size": 1 << 17,
}
NUM_WORKERS = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A sparse file of zeros, which takes no disk space until it is converted."""
    folder = tmp_path_factory.mktemp("large")
    (folder / "config.json").write_text(json.dumps(LARGE))
    shapes = hf_tensors(read_shape(folder))
    tensors = {name: ("BF16", shape) for name, shape in shapes.items()}
    create_file(folder / "model.safetensors", tensors)
    return folder


@pytest.fixture(scope="module")
def checkpoint(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("imported") / "large"
    imported = run_cli("import", "--hf", model, "--out", folder, logs=folder.parent / "logs")
    assert imported.exit_code == 0, imported.errors
    return folder


@pytest.fixture(params=["import", "export"])
def command(request, tmp_path):
    """A conversion whose workers have just started and are suspended."""
    source = {"import": ("--hf", "model"), "export": ("--megatron", "checkpoint")}[request.param]
    path = request.getfixturevalue(source[1])
    out = ("--out", tmp_path / "out", "--workers", str(NUM_WORKERS))
    running = Command(request.param, source[0], path, *out, logs=tmp_path / "logs")
    running.workers = running.stopped_workers(NUM_WORKERS)
    yield running
    running.kill()


def resume(command):
    for worker in command.workers:
        worker.resume()


def check_nothing_is_left(command, tmp_path, *, left=()):
    assert {path.name for path in tmp_path.iterdir()} == {"logs", *left}
    _, alive = psutil.wait_procs(command.workers, timeout=5)
    assert alive == []


@pytest.mark.parametrize("command", ["import", "export"], indirect=True)
def test_sigterm_ends_it_as_a_failure_and_removes_what_is_half_written(command, tmp_path):
    os.kill(command.pid, signal.SIGTERM)
    resume(command)
    finished = command.finish(30)
    assert finished.exit_code == 128 + signal.SIGTERM
    assert finished.message == "stopped by SIGTERM"
    check_nothing_is_left(command, tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
@pytest.mark.parametrize("command", ["import"], indirect=True)
def test_a_signal_to_all_its_processes_ends_it_as_well(command, tmp_path, number):
    """Slurm and terminals send signals this way."""
    os.killpg(command.pid, number)
    resume(command)
    finished = command.finish(30)
    assert finished.exit_code == 128 + number
    assert finished.message == f"stopped by {number.name}"
    check_nothing_is_left(command, tmp_path)


def test_sigkill_leaves_a_folder_that_does_not_look_finished_and_no_worker(command, tmp_path):
    command.kill()
    check_nothing_is_left(command, tmp_path, left=["out.partial"])


def test_a_killed_worker_ends_it_with_a_message(command, tmp_path):
    command.workers[0].kill()
    resume(command)
    finished = command.finish(30)
    assert finished.exit_code == 3
    assert finished.message == "a worker process was killed: out of memory?"
    check_nothing_is_left(command, tmp_path)


def test_a_disk_that_fills_in_mid_copy_is_told_with_the_file(command, tmp_path):
    for worker in command.workers:  # writes beyond the first MiB of a file fail
        resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    resume(command)
    finished = command.finish(30)
    assert finished.exit_code == 2
    assert os.strerror(errno.EFBIG) in finished.message
    assert re.search(rf"{tmp_path}/out\.partial/\S+\.(distcp|safetensors)", finished.message)
    check_nothing_is_left(command, tmp_path)
