"""Files of torch.save: every tensor is located without being loaded, and no code runs."""

import ctypes
import mmap
import pickle
import re
import zipfile
from collections import OrderedDict
from contextlib import closing
from pathlib import Path

import pytest
import torch

from checkpoint_convert.formats.tensor_io import StoredTensors
from checkpoint_convert.formats.torch_dtypes import DTYPES
from checkpoint_convert.formats.torch_file import read_place, read_places, saved_tensor
from helpers.models.conversions import Touch, assert_same, bytes_of, read_tensor
from parallel import Box


@pytest.fixture
def path(tmp_path):
    return tmp_path / "pytorch_model.bin"


def stored(path):
    """All tensors, read at the places that `read_places` gives."""
    places = read_places(path)
    with closing(StoredTensors(places)) as tensors:
        return {
            name: read_tensor(tensors, name, Box.whole(place.shape))
            for name, place in places.items()
        }


def refusal(path) -> str:
    with pytest.raises(ValueError) as error:
        read_places(path)
    assert str(path) in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("dtype", "with_checksums"), [*((dtype, True) for dtype in DTYPES), ("BF16", False)]
)
def test_read_places_finds_every_tensor(path, dtype, with_checksums):
    saved = OrderedDict(
        {f"layers.{i}.weight": torch.randn(i + 1, 7, 33).to(DTYPES[dtype]) for i in range(20)}
    )
    torch.serialization.set_crc32_options(with_checksums)
    try:
        torch.save(saved, path)
    finally:
        torch.serialization.set_crc32_options(True)
    assert list(stored(path)) == list(saved)
    assert_same(stored(path), saved)


def test_read_places_finds_views_and_shared_storage(path):
    table = torch.randn(10, 4)
    saved = torch.nn.Linear(3, 4).state_dict()  # with metadata of its own
    saved |= {
        "embedding": table,
        "head": table,
        "rows": table[3:7],
        "parameter": torch.nn.Parameter(table[:2]),
        "attribute": torch.randn(3),
    }
    saved["attribute"].tensor_model_parallel = True
    torch.save(saved, path)
    assert_same(stored(path), {name: value.detach() for name, value in saved.items()})
    places = read_places(path)
    assert places["embedding"] == places["head"]
    assert places["rows"].offset == places["embedding"].offset + 3 * 4 * 4


def test_read_place_reports_disk_errors(path):
    """In /proc/self/mem, with only a file's start mapped, reading on gives EIO as a broken disk."""
    torch.save(torch.zeros(5000), path)
    memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    memory[: mmap.PAGESIZE] = path.read_bytes()[: mmap.PAGESIZE]
    memory.resize(mmap.PAGESIZE)
    name = Path("/proc/self/mem")
    with name.open("rb", buffering=0) as file:
        with pytest.raises(OSError, match=f"Input/output error: '{name}'"):
            read_place(file.fileno(), name, start, 2 * mmap.PAGESIZE)
        with pytest.raises(OSError, match=f"Input/output error: '{name}'"):
            read_place(file.fileno(), name, 0, mmap.PAGESIZE)


def test_read_place_in_the_middle_of_a_file(path):
    values = [torch.randn(5, 6), torch.randn(2, 3).bfloat16(), torch.randn(4)]
    spans = []
    with path.open("wb") as file:
        file.write(b"something before")
        for value in values:
            start = file.tell()
            torch.save(value, file)
            spans.append((start, file.tell() - start))
    with path.open("rb") as file:
        places = {str(i): read_place(file.fileno(), path, *span) for i, span in enumerate(spans)}
        assert file.tell() == 0, "the position of a shared descriptor was moved"
    with closing(StoredTensors(places)) as tensors:
        for i, value in enumerate(values):
            assert torch.equal(read_tensor(tensors, str(i), Box.whole(value.shape)), value)


def test_read_places_keeps_names_of_other_dtypes(path):
    dtypes = torch.float8_e4m3fn, torch.int8, torch.uint16  # the last has no storage of its own
    torch.save({str(dtype): torch.ones(3).to(dtype) for dtype in dtypes}, path)
    for dtype, place in zip(dtypes, read_places(path).values(), strict=True):
        assert (f"torch.{place.dtype}", place.num_bytes) == (str(dtype), 3 * dtype.itemsize)


class BadCall:
    """Pickles as a call that rebuilds a tensor with arguments that torch never writes."""

    def __reduce__(self):
        return torch._utils._rebuild_tensor_v2, (1, 2, 3, 4)


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ({"w": torch.randn(4, 3).T}, "'w' is sparse or strided"),
        ({"w": torch.eye(3).to_sparse()}, "'w' is sparse or strided"),
        ({"w": torch.ones(3, device="meta")}, "'w' is from the meta device, saved without values"),
        ({"w": {"nested": torch.ones(3)}}, "'w' is dict, not a tensor"),
        ({"w": BadCall()}, "is not a file of tensors"),
        ([torch.ones(3)], "holds list, not a dict of tensors"),
        (torch.nn.Linear(2, 2), "its pickle requires torch.nn.modules.linear.Linear"),
    ],
)
def test_read_places_refuses_all_but_plain_tensors(path, saved, message):
    torch.save(saved, path)
    assert message in refusal(path)


@pytest.mark.parametrize(("protocol", "culprit"), [(2, "io.open"), (4, "more than tensors")])
@pytest.mark.filterwarnings("ignore:Detected pickle protocol 4")
def test_read_places_runs_no_code(path, tmp_path, protocol, culprit):
    canary = tmp_path / "canary"
    pickle.loads(pickle.dumps(Touch(canary)))
    assert canary.exists(), "the attack does not work"
    canary.unlink()
    torch.save({"w": torch.ones(2), "x": Touch(canary)}, path, pickle_protocol=protocol)
    assert f"{culprit}, which is not allowed" in refusal(path)
    assert not canary.exists()


def test_read_places_refuses_the_old_format_of_torch(path):
    torch.save({"w": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    assert "load it and save it again with a newer torch" in refusal(path)


@pytest.mark.parametrize("keep", [0, 100, 0.5, -1])
def test_read_places_refuses_a_truncated_file(path, keep):
    torch.save({"a": torch.randn(100), "b": torch.randn(100)}, path)
    data = path.read_bytes()
    path.write_bytes(data[: keep if isinstance(keep, int) else len(data) // 2])
    refusal(path)


@pytest.mark.parametrize(
    ("count", "message"),
    [(0, "'x' is not where torch saves it"), (1, "'w' ends at byte 2040 of 800 bytes")],
)
def test_read_places_refuses_ends_after_a_storage(path, count, message):
    torch.save({"w": torch.ones(100, dtype=torch.float64), "x": torch.ones(1000)}, path)
    data = path.read_bytes()
    # Element counts in the pickle: of the storage and, in a 1-tuple, of the tensor.
    before = (b"Kdtq", b"Kd\x85q")[count]
    assert data.count(before) == 1
    path.write_bytes(data.replace(before, before.replace(b"d", b"\xff")))
    assert re.search(message, refusal(path))


# Other programs may have written the archive.


def rewrite(path, compressed=()):
    """Rewrite the archive by another program."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in records.items():
            method = zipfile.ZIP_DEFLATED if Path(name).name in compressed else zipfile.ZIP_STORED
            archive.writestr(name, content, compress_type=method)


def test_read_places_refuses_a_repacked_archive(path):
    """Places of records are computed by torch, not looked up."""
    torch.save({f"w{i}": torch.randn(i + 1, 7) for i in range(12)}, path)
    rewrite(path)
    assert "'w1' is not where torch saves it: load it and save it with torch" in refusal(path)


def test_read_places_without_a_format_version(path):
    """Only a format version says that the places of records can be computed."""
    saved = {f"w{i}": torch.randn(i + 1, 7) for i in range(12)}
    torch.save(saved, path)
    path.write_bytes(path.read_bytes().replace(b".format_version", b".other_version1"))
    rewrite(path)
    assert_same(stored(path), saved)


@pytest.mark.parametrize("name", ["data.pkl", "0"])
def test_read_places_refuses_compressed_records(path, name):
    torch.save({"w": torch.zeros(1000)}, path)
    rewrite(path, compressed=[name])
    assert f"{name} is compressed: load it and save it with torch" in refusal(path)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (b"little", b"biggie", "not in little-endian order"),
        (b"/data/0", b"/data/7", "is not a file of tensors: .*data/0"),
    ],
)
def test_read_places_refuses_another_byte_order(path, before, after, message):
    torch.save({"w": torch.randn(10)}, path)
    path.write_bytes(path.read_bytes().replace(before, after))
    assert re.search(message, refusal(path))


def test_read_places_without_a_byte_order(path):
    """Versions of torch before 2.1 wrote such files."""
    torch.save({"w": torch.arange(10.0)}, path)
    path.write_bytes(path.read_bytes().replace(b"byteorder", b"something"))
    assert torch.equal(stored(path)["w"], torch.arange(10.0))


def test_read_places_refuses_a_false_directory(path):
    torch.save({"w": torch.randn(10)}, path)
    data = path.read_bytes()
    header = data.rindex(b"PK\x03\x04", 0, data.index(b"/data/0"))
    path.write_bytes(data[:header] + b"else" + data[header + 4 :])
    assert "data/0 is not where its directory says" in refusal(path)


# Files whose values are written later.


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("F64", (1,)), ("F32", (2, 3, 4, 5)), ("BF16", (1, 70_000))],
)
def test_saved_tensor_is_a_file_of_torch_save(shape, dtype, path):
    value = torch.randn(shape).to(DTYPES[dtype])
    around = saved_tensor(shape, dtype)
    path.write_bytes(around.head + bytes(bytes_of(value).tolist()) + around.tail)
    assert path.stat().st_size == around.length
    assert torch.equal(torch.load(path, weights_only=True), value)
    with path.open("rb") as file:
        place = read_place(file.fileno(), path, 0, around.length)
    assert (place.offset, place.num_bytes) == (len(around.head), around.num_bytes)
