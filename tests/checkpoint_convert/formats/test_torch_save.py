"""We write what torch.save would, byte for byte, and pickles that refer to classes by name."""

import io
import pickle

import pytest
import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from checkpoint_convert.formats.torch_dist_writer import (
    Chunk,
    create_chunks,
    finish_checkpoint,
    index_of,
)
from checkpoint_convert.formats.torch_pickle import ITEM_SIZES, STORAGES
from checkpoint_convert.formats.torch_save import saved_object, saved_tensor
from checkpoint_convert.formats.torch_words import DTYPES
from parallel import Box


def saved(value, *, checksums: bool) -> bytes:
    """The bytes that torch writes."""
    stream = io.BytesIO()
    torch.serialization.set_crc32_options(checksums)
    try:
        torch.save(value, stream)
    finally:
        torch.serialization.set_crc32_options(True)
    return stream.getvalue()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1,), (7,), (3, 5), (1, 1), (300, 256), (2, 65_536), (2, 3, 4, 5), (1, 70_000, 2)]
)
def test_a_tensor_is_saved_as_torch_saves_it(shape, dtype):
    expected = saved(torch.zeros(shape, dtype=DTYPES[dtype]), checksums=False)
    ours = saved_tensor(shape, dtype)
    assert ours.head + bytes(ours.num_bytes) + ours.tail == expected
    assert ours.length == len(expected)


@pytest.mark.parametrize("value", [{}, [None], {"a": [1, 2.5, "b"]}])
def test_an_object_is_saved_as_torch_saves_it(value):
    assert saved_object(value) == saved(value, checksums=True)


def test_every_dtype_of_torch_is_known_with_its_size():
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    sizes = {str(dtype).removeprefix("torch."): dtype.itemsize for dtype in dtypes}
    missing = {name for name in sizes if name not in ITEM_SIZES}
    # Only dtypes of quantized tensors, which torch saves differently, and dtypes of a few bits.
    assert all(name.startswith(("q", "bits", "int", "uint")) for name in missing), missing
    assert {name: sizes[name] for name in ITEM_SIZES} == ITEM_SIZES


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_every_storage_of_torch_is_known_with_its_dtype():
    for name, dtype in STORAGES.items():
        assert getattr(torch, name).dtype == getattr(torch, dtype)
    classes = {name for name in vars(torch) if name.endswith("Storage")}
    untyped = {"Storage", "TypedStorage", "UntypedStorage"}
    quantized = {name for name in classes if name.startswith("Q")}
    assert classes - untyped - quantized == STORAGES.keys()


def test_metadata_are_those_that_torch_would_have_pickled(tmp_path):
    boxes = [Box((0, 0), (2, 4)), Box((2, 0), (1, 4))]
    chunks = [Chunk("a.weight", box, (3, 4), "BF16") for box in boxes]
    created = create_chunks(tmp_path, [chunks])
    finish_checkpoint(tmp_path, index_of(created, ["nothing"]))
    size = torch.Size
    places = {
        MetadataIndex("a.weight", size(each.chunk.box.start)): _StorageInfo(
            each.file, each.offset, each.length
        )
        for each in created
    }
    length = len(saved([None], checksums=True))
    places[MetadataIndex("nothing")] = _StorageInfo("__empty_0.distcp", 0, length)
    tensor = TensorStorageMetadata(
        TensorProperties(torch.bfloat16),
        size((3, 4)),
        [ChunkStorageMetadata(size(box.start), size(box.size)) for box in boxes],
    )
    expected = Metadata(
        {"a.weight": tensor, "nothing": BytesStorageMetadata()},
        storage_data=places,
        version=CURRENT_DCP_VERSION,
    )
    found = pickle.loads((tmp_path / ".metadata").read_bytes())
    assert found == expected
    assert repr(found) == repr(expected)  # includes fields that == ignores
