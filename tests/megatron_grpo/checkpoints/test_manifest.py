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
    told = [(0, 0)]
    verify(folder, manifest, manifest, lambda done, total: told.append((done, total)))
    assert told[-1] == (100_002, 100_002)


def test_it_holds_what_sha256sum_prints(folder):
    entry = json.loads((folder / "manifest.json").read_text())["files"]["sub/config"]
    assert entry == {"num_bytes": 2, "sha256": hashlib.sha256(b"{}").hexdigest()}
    check(folder)


def flip(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


@pytest.mark.parametrize(
    ("name", "spoil", "told"),
    [
        ("weights", flip, "weights is damaged"),
        ("weights", lambda path: os.truncate(path, 99_000), "weights has 99000 of 100000 bytes"),
        ("sub/config", Path.unlink, "sub/config is missing"),
        ("manifest.json", Path.unlink, "its save was not finished"),
    ],
)
def test_what_differs_is_named(folder, name, spoil, told):
    spoil(folder / name)
    with pytest.raises(ValueError, match=told):
        check(folder)


def test_a_file_or_manifest_that_the_disk_does_not_give_is_not_called_damaged(folder):
    unreadable = Path("/proc/self/mem")  # reading its first byte fails with EIO, as a bad disk does
    listed = {unreadable.name: FileHash(1, "")}
    with pytest.raises(OSError, match=f"Input/output error: '{unreadable}'"):
        verify(unreadable.parent, listed, listed, lambda done, total: None)
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").symlink_to(unreadable)
    with pytest.raises(OSError, match=f"Input/output error: '{folder}/manifest.json'"):
        check(folder)


@pytest.mark.parametrize("text", ["", "[]", '{"files": {"weights": {}}}', '{"files": [1]}', "\0"])
def test_a_damaged_manifest_is_one(folder, text):
    (folder / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
        check(folder)


@pytest.mark.parametrize("name", ["../other", "sub/../../other", "/etc/passwd", ".."])
def test_it_does_not_lead_out_of_the_folder(folder, name):
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
