"""Quantised folders: the same bytes from a checkpoint and from ranks at any layout."""

import json
import os
import re
import resource
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from checkpoint_convert import read_shape
from checkpoint_convert.formats.tensor_io import StoredTensors
from checkpoint_convert.hf_config import read_scheme
from checkpoint_convert.hf_export import create_export, write_weights
from checkpoint_convert.hf_to_megatron import import_checkpoint
from checkpoint_convert.megatron_to_hf import export_checkpoint
from checkpoint_convert.quantized.model import quantized_layout, quantized_model
from checkpoint_convert.quantized.numbers import block_maxima, quantized, scales_of
from checkpoint_convert.quantized.scheme import SCHEMES, engine_config, ignored_modules
from checkpoint_convert.quantized.shard import QuantizedShard, quantized_tensors
from checkpoint_convert.transfer import transfer
from checkpoint_convert.verify import verify_weights
from checkpoint_convert.weights import whole_tensors
from helpers.models.conversions import (
    assert_same,
    config_of,
    rank_parameters,
    round_trip,
    variant,
    weights_of,
)
from helpers.models.published import write_config
from helpers.models.quantized import NVFP4, is_quantized, nvfp4_copies, nvfp4_weights
from helpers.models.tiny import add_mtp_layer, tiny_model
from parallel import ParallelDims

# Blocks of 128 divide these sizes, but not the share of a rank at tp4 or tp8, which may have no
# keys at all. In the latents' down-projections the last blocks are partial.
SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
FAMILIES = {
    "qwen3": {"head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 2},
    "phi3": {"head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 2},
    "qwen3_moe": {"head_dim": 64, "num_key_value_heads": 4, "moe_intermediate_size": 128},
    "deepseek_v3": {"q_lora_rank": 128, "moe_intermediate_size": 128, "v_head_dim": 16},
}
CUTS = {
    "qwen3": [ParallelDims(tensor=8), ParallelDims(tensor=2, pipeline=2, data=2)],
    "phi3": [ParallelDims(tensor=8)],
    "qwen3_moe": [
        ParallelDims(tensor=4, pipeline=2),
        ParallelDims(tensor=2, data=2, expert=2, expert_tensor=2),
    ],
    "deepseek_v3": [ParallelDims(tensor=4, expert=2, data=2, expert_tensor=1)],
}
# NVFP4 of weights that are fused in the files, or only in engines; see also below.
CASES = [
    (family, scheme)
    for family in FAMILIES
    for scheme in SCHEMES
    if scheme != "nvfp4" or family in ("phi3", "deepseek_v3")
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """(model, its checkpoint in bfloat16, export of the checkpoint) by family."""
    found = {}
    for family, sizes in FAMILIES.items():
        folder = tmp_path_factory.mktemp(family)
        model = tiny_model(folder / "model", family, **SIZES, **sizes)
        plain = round_trip(model, folder, ParallelDims(tensor=2), import_dtype="BF16")
        found[family] = model, folder / "checkpoint", plain
    return found


@pytest.fixture(scope="module")
def exports(checkpoints, tmp_path_factory):
    """Quantised folders by family and scheme."""
    folder = tmp_path_factory.mktemp("exports")
    found = {case: folder / "-".join(case) for case in CASES}
    for (family, scheme), out in found.items():
        checkpoint = checkpoints[family][1]
        export_checkpoint(checkpoint, out, quantization=scheme, max_shard_bytes=400_000)
    return found


def quantized_at_once(
    plain: dict[str, Tensor], scheme: str, ignored: Sequence[str] = ()
) -> dict[str, Tensor]:
    """Tensors that the folder must hold, from whole ones; `ignored` modules stay unquantised."""
    if scheme == "nvfp4":
        return nvfp4_weights(plain)
    dtype = torch.int8 if scheme == "int8" else torch.float8_e4m3fn
    suffix = "_scale_inv" if scheme == "fp8" else "_scale"
    found = {}
    for name, value in plain.items():
        found[name] = value
        if is_quantized(name, value) and name not in ignored:
            block = (128, 128) if scheme == "fp8" else (1, value.shape[1])
            scales = scales_of(block_maxima(value, block), dtype)
            found[name] = quantized(value, scales, dtype, block)
            found[name + suffix] = scales
    return found


@pytest.mark.parametrize(("family", "scheme"), CASES)
def test_export_is_the_model_quantised_and_says_so(checkpoints, exports, family, scheme):
    _, checkpoint, plain = checkpoints[family]
    folder = exports[family, scheme]
    assert_same(weights_of(folder), quantized_at_once(weights_of(plain), scheme))
    found = read_scheme(folder)
    assert found is not None and found.read_as == "BF16"
    table = config_of(folder)["quantization_config"]
    ignored = table["modules_to_not_convert"] if scheme == "fp8" else table["ignore"]
    routers = [n for n in weights_of(plain) if n.endswith("mlp.gate.weight")]
    assert ignored == [*(n.removesuffix(".weight") for n in routers), "lm_head"]
    assert verify_weights(folder, plain) == verify_weights(checkpoint, folder) == []
    assert verify_weights(plain, folder, tolerance=0.0)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_export_is_read_by_transformers(exports, scheme):
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    folder = exports["phi3" if scheme == "nvfp4" else "qwen3", scheme]
    how = CompressedTensorsConfig(run_compressed=False)
    options = {} if scheme == "fp8" else {"quantization_config": how}
    found = AutoModelForCausalLM.from_pretrained(folder, **options).state_dict()
    # transformers rounds scales per row to bfloat16 before it multiplies.
    error = 2**-7 if scheme in ("fp8_channel", "int8") else 0.0
    for name, expected in whole_tensors(folder):
        assert found[name].dtype == torch.bfloat16
        torch.testing.assert_close(found[name], expected.bfloat16(), rtol=error, atol=0.0)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_export_config_is_read_by_compressed_tensors(exports, scheme):
    from compressed_tensors.quantization import QuantizationConfig
    from transformers import AutoConfig

    folder = exports["deepseek_v3", scheme]
    table = AutoConfig.from_pretrained(folder).quantization_config
    if scheme == "fp8":
        assert table["weight_block_size"] == [128, 128]
        return
    config = QuantizationConfig.model_validate(table)
    [group] = config.config_groups.values()
    if scheme == "nvfp4":
        own = {"observer", "zp_dtype"}
        assert group.weights.model_dump(exclude=own) == NVFP4.weights.model_dump(exclude=own)
        assert (group.input_activations, config.format) == (None, "nvfp4-pack-quantized")
        return
    activations = group.input_activations
    assert (group.weights.strategy, group.weights.dynamic) == ("channel", False)
    assert (activations.strategy, activations.dynamic) == ("token", True)


IGNORED = [r"re:model\.layers\.0\.self_attn\.", "model.layers.1.mlp.shared_experts.down_proj"]


@pytest.mark.parametrize("scheme", ["fp8", "int8"])
def test_export_keeps_ignored_modules(checkpoints, tmp_path, scheme):
    _, checkpoint, plain = checkpoints["deepseek_v3"]
    export_checkpoint(checkpoint, tmp_path / "out", quantization=scheme, ignore=IGNORED)
    weights = weights_of(plain)
    matching = re.compile(r"model\.layers\.0\.self_attn\.|" + re.escape(IGNORED[1]))
    names = [n for n in weights if matching.match(n) and is_quantized(n, weights[n])]
    assert len(names) == 6
    assert_same(weights_of(tmp_path / "out"), quantized_at_once(weights, scheme, names))
    table = config_of(tmp_path / "out")["quantization_config"]
    assert {name.removesuffix(".weight") for name in names} < {*ignored_modules(table)}
    # An engine with this config quantises the same modules.
    again = dict(quantized_tensors(plain, scheme, ignored_modules(table)))
    assert_same(again, weights_of(tmp_path / "out"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "model.layers.0.self_attn.qkv_proj",
            "the model has no module 'model.layers.0.self_attn.",
        ),
        (
            "re:.*q_proj$",
            "lacks model.layers.0.self_attn.k_proj.weight, model.layers.0.self_attn.",
        ),
        ("re:.*experts.0.", "lacks model.layers.0.mlp.experts.1.gate_proj.weight, "),
        ("re:.*", "names all linear layers, which leaves none for quantization int8"),
        ("re:(", "'re:(' is no regular expression: missing )"),
    ],
)
def test_quantized_model_refuses_partly_ignored_modules(checkpoints, name, message):
    model, _, _ = checkpoints["qwen3_moe"]
    with pytest.raises(ValueError, match=re.escape(message)):
        quantized_model("int8", read_shape(model), "BF16", [name])


def test_quantized_model_refuses_names_unknown_to_vllm(tmp_path):
    shape = read_shape(tiny_model(tmp_path, "minimax_m2"))
    assert quantized_model("int8", shape, "BF16", [r"re:model\.layers\.0\.self_attn\."])
    with pytest.raises(
        ValueError, match=r"block_sparse_moe\.experts\..* in minimax_m2, vLLM looks"
    ):
        quantized_model("int8", shape, "BF16", [r"re:model\.layers\.0\."])


@pytest.mark.parametrize("scheme", ["fp8", "int8"])
def test_engine_config_fits_into_an_argument(tmp_path, scheme):
    folder = write_config(tmp_path / "model", "DeepSeek-V3", num_hidden_layers=8)
    given = (scheme, read_shape(folder), "BF16")
    model = quantized_model(*given, [r"re:model\.layers\.[3-6]\."])
    config = engine_config(model.config)
    assert len(json.dumps(model.config)) > 131_072 > 4 * len(json.dumps(config))
    assert quantized_model(*given, ignored_modules(config)) == model


def test_export_refuses_ignored_modules_without_quantisation(checkpoints, tmp_path):
    _, checkpoint, _ = checkpoints["qwen3"]
    with pytest.raises(ValueError, match="--ignore lm_head needs --quantization"):
        export_checkpoint(checkpoint, tmp_path / "out", ignore=["lm_head"])


def shards(plain, model, dims):
    """Layout and quantised tensors of every rank, with maxima over ranks as by a collective."""
    ranks = []
    for rank in range(dims.world_size):
        at = dims.coordinates(rank)
        layout, weights = rank_parameters(plain, dims, rank)
        weights = {n: x if n.endswith("expert_bias") else x.bfloat16() for n, x in weights.items()}
        ranks.append((layout, weights, at.tensor, dims.expert_place(at).tensor))
    agreed = {}

    def add(maxima):
        for name, each in maxima.items():
            agreed[name] = torch.maximum(each, agreed.get(name, each))

    for layout, weights, *_ in ranks:
        QuantizedShard(weights, layout, model, add)
    for layout, weights, *places in ranks:
        shard = QuantizedShard(
            weights, layout, model, lambda maxima: maxima.update({n: agreed[n] for n in maxima})
        )
        yield quantized_layout(layout, model, *places), shard


@pytest.mark.parametrize(
    ("family", "scheme", "dims"), [(f, s, dims) for f, s in CASES for dims in CUTS[f]], ids=str
)
def test_write_weights_of_cut_blocks_is_the_export(
    checkpoints, exports, tmp_path, family, dims, scheme, monkeypatch
):
    monkeypatch.setattr("checkpoint_convert.quantized.shard.MAX_ELEMENTS", 7000)
    _, _, plain = checkpoints[family]
    shape = read_shape(plain)
    model = quantized_model(scheme, shape, "BF16")
    create_export(tmp_path / "out", plain, shape, torch.bfloat16, 400_000, model)
    written = [
        write_weights(tmp_path / "out", layout, shard)
        for layout, shard in shards(plain, model, dims)
    ]
    expected = weights_of(exports[family, scheme])
    assert_same(weights_of(tmp_path / "out"), expected)
    assert sum(written) == sum(value.numel() for value in expected.values())
    names = [file.name for file in exports[family, scheme].iterdir()]
    assert sorted(names) == sorted(file.name for file in (tmp_path / "out").iterdir())


def test_export_has_few_blocks_in_memory(checkpoints, tmp_path, monkeypatch):
    sizes, quantize = [], transfer.__globals__["quantized"]

    def recorded(values, *rest):
        sizes.append(values.numel())
        return quantize(values, *rest)

    monkeypatch.setattr("checkpoint_convert.transfer.PART_BYTES", 1 << 16)
    monkeypatch.setattr("checkpoint_convert.transfer.quantized", recorded)
    monkeypatch.setattr(
        "checkpoint_convert.transfer.run_tasks", lambda task, items, *_: [*map(task, items)]
    )
    _, checkpoint, plain = checkpoints["qwen3"]
    export_checkpoint(checkpoint, tmp_path / "out", quantization="fp8")
    assert max(sizes) == 1 << 15  # the parts that were asked for: two blocks
    assert_same(weights_of(tmp_path / "out"), quantized_at_once(weights_of(plain), "fp8"))


def test_export_of_cut_blocks_is_the_model_quantised(tmp_path):
    """Tensor ranks have 12 of an expert's 48 columns, cut inside blocks of 16."""
    model = tiny_model(tmp_path / "model", "qwen3_moe")
    copies = nvfp4_copies(model, tmp_path)
    stored, read = copies["NVFP4"]
    dims = ParallelDims(tensor=4)
    options = {"import_dtype": "BF16", "quantization": "nvfp4"}
    out = round_trip(model, tmp_path / "out", dims, **options)
    assert_same(weights_of(out), weights_of(stored))
    assert verify_weights(out, read) == []
    assert verify_weights(model, out, tolerance=0.1) == []


def test_the_drafting_layer_is_read_apart_and_quantised_like_the_last(tmp_path):
    """Its matrices are those of layer 1; its router and the projection to it stay as they are."""
    model = add_mtp_layer(tiny_model(tmp_path / "model", "deepseek_v3", **SIZES))
    drafter, others = (dict(quantized_tensors(model, "int8", of_mtp=x)) for x in (True, False))
    prefix, copies = "model.layers.2.", ("embed_tokens.weight", "shared_head.head.weight")
    stored = {n for n in weights_of(model) if n.startswith(prefix) and not n.endswith(copies)}
    assert {name for name in drafter if not name.endswith("_scale")} == stored
    assert not stored & others.keys()
    in_8_bits = {name for name, value in drafter.items() if value.dtype == torch.int8}
    of_last = {n.replace("layers.1.", "layers.2.") for n, v in others.items() if v.itemsize == 1}
    assert in_8_bits == of_last & stored
    assert {f"{prefix}eh_proj.weight", f"{prefix}mlp.gate.weight"} <= stored - in_8_bits


@pytest.fixture
def few_descriptors():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + 30, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_export_of_many_parts_needs_few_open_files(
    checkpoints, exports, tmp_path, monkeypatch, few_descriptors
):
    monkeypatch.setattr("checkpoint_convert.transfer.PART_BYTES", 1 << 14)
    reported = []
    export_checkpoint(
        *(checkpoints["phi3"][1], tmp_path / "out"),
        quantization="nvfp4",
        progress=lambda *both: reported.append(both),
    )
    assert_same(weights_of(tmp_path / "out"), weights_of(exports["phi3", "nvfp4"]))
    [total] = {total for _, total in reported}
    done = [done for done, _ in reported]
    assert done == sorted(done) and done[-1] == total


def test_round_trip_of_a_quantised_export_keeps_its_bytes(exports, tmp_path):
    folder = exports["qwen3_moe", "fp8"]
    out = round_trip(folder, tmp_path, ParallelDims(tensor=2), quantization="fp8")
    assert verify_weights(folder, tmp_path / "checkpoint", tolerance=0.0) == []
    assert verify_weights(out, tmp_path / "checkpoint") == []


# Faults.

DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize("fault", ["number", "scale"])
def test_verify_names_a_wrong_number_or_scale(checkpoints, exports, tmp_path, fault):
    def edit(weights):
        if fault == "number":
            weights[DOWN][3, 5] ^= 1
        else:
            weights[f"{DOWN}_scale"][3] *= 1.1

    bad = variant(exports["qwen3", "int8"], tmp_path / "bad", edit)
    for file in (*bad.glob("model-*"), bad / "model.safetensors.index.json"):
        file.unlink()
    [difference] = verify_weights(checkpoints["qwen3"][1], bad)
    assert difference.tensor == DOWN
    assert difference.num_different == (1 if fault == "number" else difference.num_different) > 0


def test_verify_names_weights_that_are_all_the_largest_number(checkpoints, exports, tmp_path):
    stored = weights_of(exports["phi3", "nvfp4"])
    numbers, scale = stored[f"{DOWN}_packed"] | 0x77, stored[f"{DOWN}_global_scale"] * 1e8
    values = {f"{DOWN}_packed": numbers, f"{DOWN}_global_scale": scale}
    bad = variant(exports["phi3", "nvfp4"], tmp_path / "bad", values)
    for file in (*bad.glob("model-*"), bad / "model.safetensors.index.json"):
        file.unlink()
    [difference] = verify_weights(bad, checkpoints["phi3"][2])
    assert difference.tensor == DOWN


def test_verify_compares_the_sign_of_a_zero_in_fp8(tmp_path):
    model = tiny_model(tmp_path / "model", "qwen3")
    plain = {name: value.bfloat16() for name, value in weights_of(model).items()}
    plain[DOWN][3, 5] = 0.0
    zero = variant(model, tmp_path / "zero", plain)
    out = round_trip(zero, tmp_path, quantization="fp8_channel")
    assert verify_weights(tmp_path / "checkpoint", out) == []
    plain[DOWN][3, 5] = -0.0
    [difference] = verify_weights(variant(model, tmp_path / "minus", plain), out)
    assert (difference.tensor, difference.num_different) == (DOWN, 1)


def test_export_refuses_weights_that_are_not_finite(checkpoints, tmp_path, monkeypatch):
    def edit(weights):
        weights[DOWN][7, 9] = torch.nan

    model = variant(checkpoints["qwen3"][0], tmp_path / "model", edit)
    message = f"{DOWN} has values that are not finite"
    with pytest.raises(ValueError, match=rf"{message} \(NaN\), in .*model\.safetensors: "):
        import_checkpoint(model, tmp_path / "in", ParallelDims())
    assert not (tmp_path / "in").exists()
    with monkeypatch.context() as patch:  # as it was saved
        patch.setattr(StoredTensors, "must_be_finite", False)
        import_checkpoint(model, tmp_path / "in", ParallelDims())
    for quantization in ("none", "int8", "nvfp4"):
        with pytest.raises(ValueError, match=message):
            export_checkpoint(tmp_path / "in", tmp_path / "out", quantization=quantization)
        assert not (tmp_path / "out").exists()
