"""Files that differ from their manifest are found and named."""

import hashlib
import json
import os
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_grpo.checkpoints.manifest import (
    FileHash,
    fair_share,
    hash_files,
    read_manifest,
    verify,
    write_manifest,
)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "weights").write_bytes(os.urandom(100_000))
    (tmp_path / "sub" / "config").write_text("{}")
    (tmp_path / "..a").touch()  # dots that do not lead out of the folder
    write_manifest(tmp_path, hash_files(tmp_path, ["weights", "sub/config", "..a"]))
    return tmp_path


def check(folder):
    manifest = read_manifest(folder)
    progress = [(0, 0)]
    verify(folder, manifest, manifest, lambda done, total: progress.append((done, total)))
    assert progress[-1] == (100_002, 100_002)


def test_a_manifest_has_the_sums_of_sha256sum(folder):
    entry = json.loads((folder / "manifest.json").read_text())["files"]["sub/config"]
    assert entry == {"num_bytes": 2, "sha256": hashlib.sha256(b"{}").hexdigest()}
    check(folder)


def flip(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


@pytest.mark.parametrize(
    ("name", "spoil", "error"),
    [
        ("weights", flip, "weights is damaged"),
        ("weights", lambda path: os.truncate(path, 99_000), "weights has 99000 of 100000 bytes"),
        ("sub/config", Path.unlink, "sub/config is missing"),
        ("manifest.json", Path.unlink, "its save was not finished"),
    ],
)
def test_a_differing_file_is_named(folder, name, spoil, error):
    spoil(folder / name)
    with pytest.raises(ValueError, match=error):
        check(folder)


def test_an_unreadable_file_or_manifest_is_not_called_damaged(folder):
    unreadable = Path("/proc/self/mem")  # reading its first byte fails with EIO, as a bad disk does
    listed = {unreadable.name: FileHash(1, "")}
    with pytest.raises(OSError, match=f"Input/output error: '{unreadable}'"):
        verify(unreadable.parent, listed, listed, lambda done, total: None)
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").symlink_to(unreadable)
    with pytest.raises(OSError, match=f"Input/output error: '{folder}/manifest.json'"):
        check(folder)


@pytest.mark.parametrize("text", ["", "[]", '{"files": {"weights": {}}}', '{"files": [1]}', "\0"])
def test_a_damaged_manifest_is_called_damaged(folder, text):
    (folder / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
        check(folder)


@pytest.mark.parametrize("name", ["../other", "sub/../../other", "/etc/passwd", ".."])
def test_a_manifest_does_not_lead_out_of_the_folder(folder, name):
    (folder / "manifest.json").write_text(
        json.dumps({"files": {name: {"num_bytes": 0, "sha256": ""}}})
    )
    with pytest.raises(ValueError, match=f"names {re.escape(name)}, outside"):
        check(folder)


@given(
    sizes=st.lists(st.integers(0, 1_000), max_size=40),
    num_ranks=st.integers(1, 9),
)
def test_every_file_is_read_by_one_rank_and_ranks_read_alike(sizes, num_ranks):
    manifest = {f"file_{i}": FileHash(size, "") for i, size in enumerate(sizes)}
    shares = [fair_share(manifest, rank, num_ranks) for rank in range(num_ranks)]
    assert Counter(name for share in shares for name in share) == Counter(manifest.keys())
    loads = [sum(manifest[name].num_bytes for name in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes, default=0)
