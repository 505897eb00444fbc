"""The command line as a user sees it: a round trip, sizes, and mistakes, which end with exit code
2, one message that names the culprit, and nothing written. Imports interrupted in mid-copy leave
no process and no output that looks finished."""

import errno
import json
import os
import re
import resource
import signal
import subprocess
import sys

import psutil
import pytest

from checkpoint_convert import hf_tensors, read_shape
from checkpoint_convert.cli import _num_bytes
from checkpoint_convert.formats.safetensors_file import create_file
from helpers.models.conversions import (
    Command,
    assert_same,
    random_weights,
    run_and_stop_workers,
    run_cli,
    variant,
    weights_of,
)
from helpers.models.tiny import tiny_model

SMOLLM2_135M = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rope_theta": 100000,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}


@pytest.mark.long
def test_cli_round_trip_of_a_whole_model_is_bitwise(tmp_path):
    model, logs = tmp_path / "model", tmp_path / "logs"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(SMOLLM2_135M))
    random_weights(model)
    checkpoint, exported = tmp_path / "checkpoint", tmp_path / "exported"
    for arguments in (
        ("import", "--hf", model, "--out", checkpoint, "--tp", "3", "--pp", "4"),
        ("verify", model, checkpoint),
        ("export", "--megatron", checkpoint, "--out", exported, "--max-shard-size", "100MB"),
        ("verify", model, exported),
    ):
        finished = run_cli(*arguments, logs=logs, seconds=120)
        assert finished.exit_code == 0, finished.errors
    assert finished.output == "the same\n"
    assert_same(weights_of(exported), weights_of(model))
    files = sorted(exported.glob("*.safetensors"))
    assert len(files) == 3
    assert all(file.stat().st_size < 100.1e6 for file in files)
    assert read_shape(exported) == read_shape(model)


def test_import_reports_progress_in_bytes(tmp_path):
    model = tiny_model(tmp_path / "model", "llama")
    out = tmp_path / "new" / "folders" / "out"
    finished = run_cli("import", "--hf", model, "--out", out, logs=tmp_path / "logs")
    assert finished.output.startswith(f"{out} is complete")
    (bar,) = finished.errors.splitlines()
    num_bytes = sum(value.nbytes for value in weights_of(model).values())
    assert bar.startswith("import ") and f"{num_bytes / 1000:.1f}/{num_bytes / 1000:.1f} kB" in bar


# Options.


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [
        ("500MB", 500 * 10**6),
        ("1.5 GiB", 3 << 29),
        ("64kb", 64_000),
        ("4096B", 4096),
    ],
)
def test_num_bytes_reads_sizes_as_people_write_them(size, num_bytes):
    assert _num_bytes(size) == num_bytes


@pytest.mark.parametrize("size", ["", "5", "5G", "-5GB", "0MB", "1e9B"])
def test_num_bytes_refuses_nonsense(size):
    with pytest.raises(ValueError, match="is not a size: write it like 5GB or 500MB"):
        _num_bytes(size)


FAULTY = """
import sys

from checkpoint_convert import cli

cli.verify_weights = lambda *arguments, **options: [][0]
sys.argv = ["checkpoint-convert", "verify", "a", "b"]
cli.main()
"""


def test_main_separates_its_own_faults_from_differences():
    failed = subprocess.run([sys.executable, "-c", FAULTY], capture_output=True, text=True)
    assert failed.returncode == 4
    assert "Traceback" in failed.stderr
    assert failed.stderr.endswith("IndexError: list index out of range\n")


def test_cli_imports_torch_before_workers_are_forked():
    code = "import sys, checkpoint_convert.cli as _; sys.exit('torch' not in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# Mistakes of users.


@pytest.fixture(scope="module")
def truncated(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("parent") / "truncated"
    return variant(model, folder, {"model.norm.weight": None})


# Refused arguments and the message. FOLDER is the test's folder, with an existing file `taken`.
REFUSED = {
    ("import", "--hf", "TRUNCATED"): r"TRUNCATED do not fit its config\.json:\n  model\.norm\.",
    ("import", "--hf", "MODEL", "--out", "FOLDER/taken"): "^FOLDER/taken exists: remove it, or",
    ("import", "--hf", "MODEL", "--out", "FOLDER/taken/out"): "'FOLDER/taken'",
    ("import", "--hf", "MODEL", "--tp", "3"): r"tensor\(3\) cannot split the model",
    ("import", "--hf", "MODEL", "--vpp", "2"): "set pipeline to 2 or more",
    ("export", "--megatron", "MODEL"): r"MODEL has no \.metadata: give the folder of one",
    (
        *("export", "--megatron", "MODEL"),
        *("--max-shard-size", "5"),
    ): "size '5' is not a size",
    (
        *("quantize", "--hf", "MODEL"),
        *("--scheme", "fp8", "--calibrate", "FOLDER/taken"),
    ): r"No module named 'modelopt': pip install .*, or without a GPU `make setup-modelopt`",
    ("verify", "MODEL", "/nowhere"): "/nowhere does not exist",
    ("inspect", "MODEL", "--pp", "3"): r"2 layers cannot fill pipeline\(3\)",
}
WRITE = ("import", "export", "quantize")


@pytest.mark.parametrize("command", REFUSED, ids=" ".join)
def test_main_reports_a_mistake_and_writes_nothing(model, truncated, tmp_path, command):
    named = {"MODEL": model, "TRUNCATED": truncated, "FOLDER": tmp_path}
    (tmp_path / "taken").write_text("precious")
    out = ["--out", "FOLDER/out"] * ("--out" not in command and command[0] in WRITE)
    words, message = [*command, *out], REFUSED[command]
    for name, path in named.items():
        words = [word.replace(name, str(path)) for word in words]
        message = message.replace(name, re.escape(str(path)))
    finished = run_cli(*words, logs=tmp_path / "logs", seconds=20)
    assert finished.exit_code == 2, finished
    assert re.search(message, finished.message), finished.message
    assert {path.name for path in tmp_path.iterdir()} == {"logs", "taken"}
    assert (tmp_path / "taken").read_text() == "precious"


def test_a_dtype_has_the_name_of_a_config_too(tmp_path):
    arguments = ("import", "--hf", tmp_path / "no", "--out", tmp_path / "out")
    finished = run_cli(*arguments, "--dtype", "bfloat16", logs=tmp_path / "logs")
    assert "no does not exist" in finished.errors


def test_main_prints_the_usage_with_bad_options(model, tmp_path):
    arguments = ("import", "--hf", model, "--out", tmp_path / "out", "--dtype", "fp8")
    finished = run_cli(*arguments, logs=tmp_path / "logs")
    assert finished.exit_code == 2
    assert "Usage: " in finished.errors and "fp8" in finished.errors
    assert not (tmp_path / "out").exists()


# Interrupted in mid-copy.

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
def large(tmp_path_factory):
    """A sparse file of zeros, which takes no disk space until it is converted."""
    folder = tmp_path_factory.mktemp("large")
    (folder / "config.json").write_text(json.dumps(LARGE))
    shapes = hf_tensors(read_shape(folder))
    tensors = {name: ("BF16", shape) for name, shape in shapes.items()}
    create_file(folder / "model.safetensors", tensors)
    return folder


@pytest.fixture
def command(large, tmp_path):
    """An import with workers that are suspended right after their start."""
    out = ("--out", tmp_path / "out", "--workers", str(NUM_WORKERS))
    arguments = ("import", "--hf", large, *out)
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
def test_import_ends_by_a_signal_and_leaves_nothing(command, tmp_path, send, number):
    send(command.pid, number)
    resume(command)
    finished = command.finish()
    assert finished.exit_code == 128 + number
    assert finished.message == f"stopped by {number.name}"
    check_nothing_is_left(command, tmp_path)


def test_import_reports_a_killed_worker(command, tmp_path):
    command.workers[0].kill()
    resume(command)
    finished = command.finish()
    assert finished.exit_code == 3
    assert finished.message == "a worker process was killed: out of memory?"
    check_nothing_is_left(command, tmp_path)


def test_import_names_the_file_on_a_full_disk(command, tmp_path):
    for worker in command.workers:  # writes beyond the first MiB of a file fail
        resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    resume(command)
    finished = command.finish()
    assert finished.exit_code == 2
    assert os.strerror(errno.EFBIG) in finished.message
    assert re.search(rf"{tmp_path}/out\.partial/\S+\.distcp", finished.message)
    check_nothing_is_left(command, tmp_path)
