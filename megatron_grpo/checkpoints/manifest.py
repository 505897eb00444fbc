"""The manifest of a checkpoint: size and SHA-256 of every file.

Disks and networks flip bits, and neither Megatron-Core nor safetensors would notice. The manifest
is written last: a folder without one is not complete.
"""

import heapq
import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path, PurePath

from checkpoint_convert.formats import errors_named
from megatron_grpo.bars import Show

MANIFEST_FILE = "manifest.json"
_BLOCK_BYTES = 1 << 20  # hashed while it is in the cache of a core


@dataclass(frozen=True)
class FileHash:
    """Expected size and hash of a file."""

    num_bytes: int
    sha256: str


Manifest = Mapping[str, FileHash]
"""File hashes by path relative to the checkpoint."""


def hash_file(path: Path, report: Callable[[int], None] = lambda num_bytes: None) -> FileHash:
    """Read the file once, at about 1 GB/s per core, while other threads can run. `report` is called
    with the number of bytes of each block."""
    digest, num_bytes, block = sha256(), 0, bytearray(_BLOCK_BYTES)
    with errors_named(path), path.open("rb", buffering=0) as file:
        while size := file.readinto(block):
            digest.update(memoryview(block)[:size])
            num_bytes += size
            report(size)
    return FileHash(num_bytes, digest.hexdigest())


def write_hashed(path: Path, parts: Iterable[memoryview]) -> FileHash:
    """Write a file and flush it to disk; return the hash that a later read must give."""
    # Hashed from memory, not read back: damage on the way to the disk shows at the next load.
    digest, num_bytes = sha256(), 0
    with errors_named(path), path.open("wb") as file:
        for part in parts:
            for start in range(0, len(part), _BLOCK_BYTES):
                block = part[start : start + _BLOCK_BYTES]
                file.write(block)
                digest.update(block)
            num_bytes += len(part)
        file.flush()
        os.fsync(file.fileno())
    return FileHash(num_bytes, digest.hexdigest())


def hash_files(folder: Path, names: Iterable[str]) -> dict[str, FileHash]:
    return {name: hash_file(folder / name) for name in names}


def write_manifest(folder: Path, manifest: Manifest) -> None:
    files = {name: asdict(manifest[name]) for name in sorted(manifest)}
    (folder / MANIFEST_FILE).write_text(
        json.dumps({"files": files}, indent=1) + "\n", encoding="utf-8"
    )


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of `folder`. Raises ValueError if it is missing or damaged, and OSError,
    naming the file, if it exists but cannot be read."""
    path = folder / MANIFEST_FILE
    try:
        with errors_named(path):
            files = json.loads(path.read_text(encoding="utf-8"))["files"]
        manifest = {name: FileHash(**entry) for name, entry in files.items()}
    except FileNotFoundError:
        raise ValueError(f"it has no {MANIFEST_FILE}: its save was not finished") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its {MANIFEST_FILE} is damaged: {error!r}") from None
    for name in manifest:
        if PurePath(name).is_absolute() or ".." in PurePath(name).parts:
            raise ValueError(f"its {MANIFEST_FILE} names {name}, outside of the checkpoint")
    return manifest


def verify(folder: Path, manifest: Manifest, names: Collection[str], show: Show) -> None:
    """Hash the files `names`. Raises ValueError naming the first that differs or is missing, and
    OSError for a file that exists but cannot be read: it may be intact."""
    done, num_bytes = 0, sum(manifest[name].num_bytes for name in names)

    def report(size: int) -> None:
        nonlocal done
        done += size
        show(done, num_bytes)

    for name in names:
        expected = manifest[name]
        try:
            found = hash_file(folder / name, report)
        except FileNotFoundError:
            raise ValueError(f"{name} is missing") from None
        if found.num_bytes != expected.num_bytes:
            raise ValueError(f"{name} has {found.num_bytes} of {expected.num_bytes} bytes")
        if found != expected:
            raise ValueError(f"{name} is damaged: its SHA-256 differs from the manifest")


def fair_share(manifest: Manifest, rank: int, num_ranks: int) -> list[str]:
    """Files that `rank` verifies: largest first, each to the rank with the fewest bytes."""
    loads = [(0, other) for other in range(num_ranks)]
    mine = []
    for name in sorted(manifest, key=lambda name: (-manifest[name].num_bytes, name)):
        load, chosen = heapq.heappop(loads)
        if chosen == rank:
            mine.append(name)
        heapq.heappush(loads, (load + manifest[name].num_bytes, chosen))
    return mine
