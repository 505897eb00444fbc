"""Imports interrupted in mid-copy leave nothing that looks finished, and no process."""

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
from helpers.models.conversions import Command, run_and_stop_workers

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


@pytest.fixture
def command(model, tmp_path):
    """An import whose workers have just started and are suspended."""
    out = ("--out", tmp_path / "out", "--workers", str(NUM_WORKERS))
    arguments = ("import", "--hf", model, *out)
    running = Command(*arguments, logs=tmp_path / "logs", run=run_and_stop_workers)
    running.workers = running.stopped_workers(NUM_WORKERS)
    yield running
    running.kill()


def resume(command):
    for worker in command.workers:
        worker.resume()


def check_nothing_is_left(command, tmp_path):
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]
    _, alive = psutil.wait_procs(command.workers, timeout=30)
    assert alive == []


# Slurm and terminals send signals to all processes.
@pytest.mark.parametrize(
    ("send", "number"),
    [(os.kill, signal.SIGTERM), (os.killpg, signal.SIGTERM), (os.killpg, signal.SIGINT)],
)
def test_a_signal_ends_it_as_a_failure_and_removes_what_is_half_written(
    command, tmp_path, send, number
):
    send(command.pid, number)
    resume(command)
    finished = command.finish()
    assert finished.exit_code == 128 + number
    assert finished.message == f"stopped by {number.name}"
    check_nothing_is_left(command, tmp_path)


def test_a_killed_worker_ends_it_with_a_message(command, tmp_path):
    command.workers[0].kill()
    resume(command)
    finished = command.finish()
    assert finished.exit_code == 3
    assert finished.message == "a worker process was killed: out of memory?"
    check_nothing_is_left(command, tmp_path)


def test_a_disk_that_fills_in_mid_copy_is_told_with_the_file(command, tmp_path):
    for worker in command.workers:  # writes beyond the first MiB of a file fail
        resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    resume(command)
    finished = command.finish()
    assert finished.exit_code == 2
    assert os.strerror(errno.EFBIG) in finished.message
    assert re.search(rf"{tmp_path}/out\.partial/\S+\.distcp", finished.message)
    check_nothing_is_left(command, tmp_path)
