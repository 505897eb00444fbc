"""A file that differs from what was written is found and named."""

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
    write_manifest(tmp_path, hash_files(tmp_path, ["weights", "sub/config"]))
    return tmp_path


def check(folder):
    manifest = read_manifest(folder)
    verify(folder, manifest, manifest, lambda num_bytes: None)


def test_it_holds_what_sha256sum_prints(folder):
    entry = json.loads((folder / "manifest.json").read_text())["files"]["sub/config"]
    assert entry == {"num_bytes": 2, "sha256": hashlib.sha256(b"{}").hexdigest()}
    check(folder)


@pytest.mark.parametrize("place", [0, 50_000, 99_999])
def test_one_bit_is_found(folder, place):
    data = bytearray((folder / "weights").read_bytes())
    data[place] ^= 1
    (folder / "weights").write_bytes(data)
    with pytest.raises(ValueError, match="weights is damaged"):
        check(folder)


def test_a_cut_file_is_named_with_its_sizes(folder):
    os.truncate(folder / "weights", 99_000)
    with pytest.raises(ValueError, match="weights has 99000 of 100000 bytes"):
        check(folder)


def test_a_missing_file_is_named(folder):
    (folder / "sub" / "config").unlink()
    with pytest.raises(ValueError, match="sub/config is missing"):
        check(folder)


# At its first byte the kernel has no memory to show: EIO, as from a disk.
UNREADABLE = Path("/proc/self/mem")


def test_a_file_that_the_disk_does_not_give_is_not_called_damaged():
    listed = {UNREADABLE.name: FileHash(1, "")}
    with pytest.raises(OSError, match=f"Input/output error: '{UNREADABLE}'"):
        verify(UNREADABLE.parent, listed, listed, lambda num_bytes: None)


def test_nor_is_such_a_manifest(folder):
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").symlink_to(UNREADABLE)
    with pytest.raises(OSError, match=f"Input/output error: '{folder}/manifest.json'"):
        check(folder)


@pytest.mark.parametrize("text", ["", "[]", '{"files": {"weights": {}}}', '{"files": [1]}', "\0"])
def test_a_damaged_manifest_is_one(folder, text):
    (folder / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
        check(folder)


def test_without_a_manifest_a_save_did_not_end(folder):
    (folder / "manifest.json").unlink()
    with pytest.raises(ValueError, match="its save was not finished"):
        check(folder)


@pytest.mark.parametrize("name", ["../other", "sub/../../other", "/etc/passwd", ".."])
def test_it_does_not_lead_out_of_the_folder(folder, name):
    (folder / "manifest.json").write_text(
        json.dumps({"files": {name: {"num_bytes": 0, "sha256": ""}}})
    )
    with pytest.raises(ValueError, match=f"names {re.escape(name)}, outside"):
        check(folder)


def test_names_with_dots_of_another_kind_do_not_either(folder):
    files = ["..a", "sub/a..b", "sub/.c"]
    for name in files:
        (folder / name).write_text("")
    write_manifest(folder, hash_files(folder, files))
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
