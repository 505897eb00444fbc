"""GGUF headers are read as the gguf library reads them, and no length in them is trusted."""

import re
import struct

import gguf
import pytest

from checkpoint_convert.formats.gguf_header import GgufHeader
from gguf_models import ARCHITECTURES, F16, Q8_0, write_gguf
from models import tiny_model

U8, U32, STRING, ARRAY = 0, 4, 8, 9
MANY = 2_000_000  # numbers, which take the library 22 s and 2.2 GB


def text(value, length=None):
    return struct.pack("<Q", len(value) if length is None else length) + value.encode()


def array(kind, length, values=b""):
    return struct.pack("<IQ", kind, length) + values


def one_value(path, kind, value, *, key="a", version=3, num_tensors=0):
    head = struct.pack("<4sIQQ", b"GGUF", version, num_tensors, 1)
    path.write_bytes(head + text(key) + struct.pack("<I", kind) + value)
    return path


def refusal(path):
    with pytest.raises(
        ValueError, match=f"^{re.escape(str(path))} is not a GGUF file, or "
    ) as said:
        GgufHeader(path)
    return str(said.value)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_values_and_tensors_are_those_that_the_library_reads(family, tmp_path):
    model = tiny_model(tmp_path / "model", family)
    path = write_gguf(
        tmp_path / "model.gguf", model, kind=lambda name: Q8_0 if "attn" in name else F16
    )
    header, reader = GgufHeader(path), gguf.GGUFReader(path)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF."):  # fields that the library adds
            assert header.get(key) == field.contents(), key
    assert len(header.tensors) == len(reader.tensors)
    for wanted in reader.tensors:
        tensor = header.tensors[wanted.name]
        assert (*reversed(tensor.shape),) == (*wanted.shape,)
        assert tensor.kind == wanted.tensor_type
        assert tensor.place.shape == wanted.data.shape
        assert (tensor.place.offset, tensor.place.num_bytes) == (wanted.data_offset, wanted.n_bytes)


def test_every_type_of_value_is_read(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_custom_alignment(256)
    values = {"uint": 200, "int": -3, "float": 0.5}
    for bits in (8, 16, 32, 64):
        for sign in ("uint", "int"):
            getattr(writer, f"add_{sign}{bits}")(f"{sign}{bits}", values[sign])
    for bits in (32, 64):
        getattr(writer, f"add_float{bits}")(f"float{bits}", values["float"])
    arrays = {"bools": [True, False], "texts": ["ä", ""], "floats": [0.5, -1.0], "ints": [3, -3]}
    for key, value in arrays.items():
        writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = GgufHeader(tmp_path / "model.gguf")
    for kind, value in values.items():
        for bits in (32, 64) if kind == "float" else (8, 16, 32, 64):
            assert header.get(f"{kind}{bits}") == value
    assert {key: header.get(key) for key in arrays} == arrays
    assert header.get("general.alignment") == 256


TOO_LONG = {
    "numbers": (ARRAY, array(U8, MANY, b"0" * 88)),
    "very many numbers": (ARRAY, array(U32, 10**12)),
    "texts": (ARRAY, array(STRING, 10**12, text("b") * 3)),
    "a text among others": (ARRAY, array(STRING, 1, text("b", 10**12))),
    "arrays": (ARRAY, array(ARRAY, 10**12, array(U8, 1, b"0") * 3)),
    "numbers of an array among others": (ARRAY, array(ARRAY, 1, array(U8, MANY))),
    "a text": (STRING, text("b", 2**64 - 1)),
}


@pytest.mark.parametrize("what", TOO_LONG)
def test_a_length_beyond_the_end_of_the_file_is_refused_at_once(what, tmp_path):
    message = refusal(one_value(tmp_path / "model.gguf", *TOO_LONG[what]))
    assert re.search(r"[\d,]+ bytes should follow byte [\d,]+, but [\d,]+ do$", message)


def test_so_is_one_of_a_key_and_of_a_tensor(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(struct.pack("<4sIQQQ", b"GGUF", 3, 0, 10**12, 10**12))
    assert "1,000,000,000,000 bytes should follow byte 32, but 0 do" in refusal(path)
    tensor = text("b") + struct.pack("<IQQIQ", 2, 2**32, 2**32, 0, 0)
    one_value(path, STRING, text("c") + tensor, num_tensors=1)
    assert "b should end at byte 73,786,976,294,838,206,560" in refusal(path)
    tensor = text("b") + struct.pack("<I", 2**32 - 1)
    one_value(path, STRING, text("c") + tensor, num_tensors=1)
    assert "34,359,738,360 bytes should follow" in refusal(path)


def test_arrays_nested_without_end_are_refused(tmp_path):
    refusal(one_value(tmp_path / "model.gguf", ARRAY, array(ARRAY, 1) * 100_000))


def test_what_no_gguf_file_says_is_named(tmp_path):
    path = tmp_path / "model.gguf"
    assert "has type 13, not 0 to 12" in refusal(one_value(path, 13, b""))
    for version in (0, 1):
        one_value(path, STRING, text("b"), version=version)
        assert f"its version is {version}, supported: (2, 3)" in refusal(path)
    alignment = {"key": "general.alignment"}
    assert "general.alignment is 0" in refusal(one_value(path, U8, b"\0", **alignment))
    twice = struct.pack("<4sIQQ", b"GGUF", 3, 0, 2) + (text("a") + struct.pack("<I?", 7, True)) * 2
    path.write_bytes(twice)
    assert "it has 'a' twice" in refusal(path)
    tensor = text("b") + struct.pack("<IQIQ", 1, 33, int(Q8_0), 0)
    one_value(path, STRING, text("c") + tensor, num_tensors=1)
    assert "a row of 33 values is not a multiple of its blocks of 32" in refusal(path)


@pytest.mark.parametrize("value", [(ARRAY, array(STRING, 1, text("llama"))), (U8, b"1")])
def test_an_architecture_and_a_count_of_files_may_be_anything(tmp_path, value):
    path = one_value(tmp_path / "model.gguf", *value, key="general.architecture")
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))} has architecture .* not supp"):
        GgufHeader(path)
    path = one_value(tmp_path / "model.gguf", STRING, text("two"), key="split.count")
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))} is one of two files"):
        GgufHeader(path)


def test_a_big_endian_file_is_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match="is a big-endian GGUF file; convert it to little-endian"):
        GgufHeader(tmp_path / "model.gguf")
