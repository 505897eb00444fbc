"""Quantised folders: written from a checkpoint or by ranks, at any cut, they are the same bytes."""

import json
import re
from collections.abc import Sequence

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoint_convert import megatron_layout, read_shape
from checkpoint_convert.formats.safetensors_file import read_header
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
from checkpoint_convert.weights import read_weights, whole_tensors
from helpers.models.conversions import assert_same, weights_of
from helpers.models.published import write_config
from helpers.models.quantized import NVFP4, is_quantized, nvfp4_weights
from helpers.models.tiny import tiny_model
from parallel import ParallelDims

# Sizes of which blocks of 128 are parts, but not of what a tensor rank of 4 or 8 holds, which may
# have no keys at all. In the latents' down-projections the last blocks are partial.
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
# Of NVFP4 what test_nvfp4.py has not: weights that are fused in the files, or elsewhere in engines.
CASES = [
    (family, scheme)
    for family in FAMILIES
    for scheme in SCHEMES
    if scheme != "nvfp4" or family in ("phi3", "deepseek_v3")
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """(Model, checkpoint of it in bfloat16, export of that) by family."""
    found = {}
    for family, sizes in FAMILIES.items():
        folder = tmp_path_factory.mktemp(family)
        model = tiny_model(folder / "model", family, **SIZES, **sizes)
        import_checkpoint(model, folder / "in", ParallelDims(tensor=2), dtype="BF16")
        export_checkpoint(folder / "in", folder / "plain")
        found[family] = model, folder / "in", folder / "plain"
    return found


@pytest.fixture(scope="module")
def exports(checkpoints, tmp_path_factory):
    """Quantised folders by family and scheme."""
    folder = tmp_path_factory.mktemp("exports")
    found = {}
    for family, scheme in CASES:
        _, checkpoint, _ = checkpoints[family]
        found[family, scheme] = folder / f"{family}-{scheme}"
        export_checkpoint(
            checkpoint, found[family, scheme], quantization=scheme, max_shard_bytes=400_000
        )
    return found


def quantized_at_once(
    plain: dict[str, Tensor], scheme: str, ignored: Sequence[str] = ()
) -> dict[str, Tensor]:
    """What the folder must hold, from whole tensors; those of `ignored` stay as they are."""
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
def test_an_export_is_the_model_quantised_and_says_so(checkpoints, exports, family, scheme):
    _, checkpoint, plain = checkpoints[family]
    folder = exports[family, scheme]
    assert_same(weights_of(folder), quantized_at_once(weights_of(plain), scheme))
    found = read_scheme(folder)
    assert found is not None and found.read_as == "BF16"
    table = json.loads((folder / "config.json").read_text())["quantization_config"]
    ignored = table["modules_to_not_convert"] if scheme == "fp8" else table["ignore"]
    routers = [n for n in weights_of(plain) if n.endswith("mlp.gate.weight")]
    assert ignored == [*(n.removesuffix(".weight") for n in routers), "lm_head"]
    assert verify_weights(folder, plain) == verify_weights(checkpoint, folder) == []
    assert verify_weights(plain, folder, tolerance=0.0)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_transformers_computes_with_what_the_numbers_stand_for(exports, scheme):
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    folder = exports["phi3" if scheme == "nvfp4" else "qwen3", scheme]
    how = (
        {}
        if scheme == "fp8"
        else {"quantization_config": CompressedTensorsConfig(run_compressed=False)}
    )
    found = AutoModelForCausalLM.from_pretrained(folder, **how).state_dict()
    # Scales per row become bfloat16 before it multiplies by them.
    error = 2**-7 if scheme in ("fp8_channel", "int8") else 0.0
    for name, expected in whole_tensors(folder):
        assert found[name].dtype == torch.bfloat16
        torch.testing.assert_close(found[name], expected.bfloat16(), rtol=error, atol=0.0)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_compressed_tensors_reads_the_config(exports, scheme):
    from compressed_tensors.quantization import QuantizationConfig
    from transformers import AutoConfig

    folder = exports["deepseek_v3", scheme]
    table = AutoConfig.from_pretrained(folder).quantization_config
    if scheme == "fp8":
        assert table["weight_block_size"] == [128, 128]
    else:
        config = QuantizationConfig.model_validate(table)
        [group] = config.config_groups.values()
        if scheme == "nvfp4":
            own = {"observer", "zp_dtype"}
            assert group.weights.model_dump(exclude=own) == NVFP4.weights.model_dump(exclude=own)
            assert (group.input_activations, config.format) == (None, "nvfp4-pack-quantized")
            return
        assert (group.weights.strategy, group.weights.dynamic) == ("channel", False)
        assert (group.input_activations.strategy, group.input_activations.dynamic) == (
            "token",
            True,
        )


IGNORED = [r"re:model\.layers\.0\.self_attn\.", "model.layers.1.mlp.shared_experts.down_proj"]


@pytest.mark.parametrize("scheme", ["fp8", "int8"])
def test_modules_that_are_named_stay_as_they_are(checkpoints, tmp_path, scheme):
    _, checkpoint, plain = checkpoints["deepseek_v3"]
    export_checkpoint(checkpoint, tmp_path / "out", quantization=scheme, ignore=IGNORED)
    weights = weights_of(plain)
    matching = re.compile(r"model\.layers\.0\.self_attn\.|" + re.escape(IGNORED[1]))
    names = [n for n in weights if matching.match(n) and is_quantized(n, weights[n])]
    assert len(names) == 6
    assert_same(weights_of(tmp_path / "out"), quantized_at_once(weights, scheme, names))
    table = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert {name.removesuffix(".weight") for name in names} < {*ignored_modules(table)}
    # What an engine is told by this config, it quantises alike.
    again = dict(quantized_tensors(plain, scheme, ignored_modules(table)))
    assert_same(again, weights_of(tmp_path / "out"))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "model.layers.0.self_attn.qkv_proj",
            "the model has no module 'model.layers.0.self_attn.q",
        ),
        (
            "re:.*q_proj$",
            "lacks model.layers.0.self_attn.k_proj.weight, model.layers.0.self_attn.v",
        ),
        ("re:.*experts.0.", "lacks model.layers.0.mlp.experts.1.gate_proj.weight, "),
        ("re:.*", "names all linear layers, so that quantization int8 has none"),
        ("re:(", "'re:(' is no regular expression: missing )"),
    ],
)
def test_names_that_would_leave_an_engine_with_other_weights_are_refused(checkpoints, name, told):
    model, _, _ = checkpoints["qwen3_moe"]
    with pytest.raises(ValueError, match=re.escape(told)):
        quantized_model("int8", read_shape(model), "BF16", [name])


def test_experts_that_vllm_looks_for_by_another_name_are_refused(tmp_path):
    shape = read_shape(tiny_model(tmp_path, "minimax_m2"))
    assert quantized_model("int8", shape, "BF16", [r"re:model\.layers\.0\.self_attn\."])
    with pytest.raises(
        ValueError, match=r"block_sparse_moe\.experts\..* in minimax_m2, vLLM looks"
    ):
        quantized_model("int8", shape, "BF16", [r"re:model\.layers\.0\."])


@pytest.mark.parametrize("scheme", ["fp8", "int8"])
def test_experts_that_are_ignored_fit_into_an_argument_of_a_command(tmp_path, scheme):
    folder = write_config(tmp_path / "model", "DeepSeek-V3", num_hidden_layers=8)
    given = (scheme, read_shape(folder), "BF16")
    model = quantized_model(*given, [r"re:model\.layers\.[3-6]\."])
    told = engine_config(model.config)
    assert len(json.dumps(model.config)) > 131_072 > 4 * len(json.dumps(told))
    assert quantized_model(*given, ignored_modules(told)) == model


def test_modules_are_ignored_only_where_others_are_quantised(checkpoints, tmp_path):
    _, checkpoint, _ = checkpoints["qwen3"]
    with pytest.raises(ValueError, match="lm_head to ignore, and no quantization"):
        export_checkpoint(checkpoint, tmp_path / "out", ignore=["lm_head"])


def shards(plain, model, dims):
    """Layout and quantised tensors of every rank, with maxima as a collective makes them."""
    shape = read_shape(plain)
    ranks = []
    for rank in range(dims.world_size):
        at = dims.coordinates(rank)
        layout = megatron_layout(shape, dims, at, transformer_engine=False)
        weights = {
            n: torch.empty(s, dtype=torch.float32 if n.endswith("expert_bias") else torch.bfloat16)
            for n, s in layout.shapes.items()
        }
        read_weights(plain, shape, layout, weights)
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
def test_ranks_whose_cuts_fall_into_blocks_write_the_same_bytes(
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


def test_no_more_than_some_blocks_are_in_memory(checkpoints, tmp_path, monkeypatch):
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


def test_an_import_of_an_export_is_its_dequantised_copy(exports, tmp_path):
    folder = exports["qwen3_moe", "fp8"]
    import_checkpoint(folder, tmp_path / "in", ParallelDims(tensor=2))
    export_checkpoint(tmp_path / "in", tmp_path / "again", quantization="fp8")
    assert verify_weights(folder, tmp_path / "in", tolerance=0.0) == []
    assert verify_weights(tmp_path / "again", tmp_path / "in") == []


# Faults.

DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize("fault", ["number", "scale"])
def test_verify_names_a_weight_with_one_wrong_number_or_scale(
    checkpoints, exports, tmp_path, fault
):
    folder, (_, checkpoint, _) = exports["qwen3", "int8"], checkpoints["qwen3"]
    (tmp_path / "bad").mkdir()
    for file in folder.iterdir():
        (tmp_path / "bad" / file.name).write_bytes(file.read_bytes())
    name = DOWN if fault == "number" else f"{DOWN}_scale"
    [path] = [f for f in (tmp_path / "bad").glob("*.safetensors") if name in read_header(f)]
    tensors = load_file(path)
    if fault == "number":
        tensors[name][3, 5] ^= 1
    else:
        tensors[name][3] *= 1.1
    save_file(tensors, path)
    [difference] = verify_weights(checkpoint, tmp_path / "bad")
    assert difference.tensor == DOWN
    assert difference.num_different == (1 if fault == "number" else difference.num_different) > 0


def test_verify_tells_the_sign_of_a_zero_in_fp8(tmp_path):
    model = tiny_model(tmp_path / "model", "qwen3")
    plain = {name: value.bfloat16() for name, value in weights_of(model).items()}
    plain[DOWN][3, 5] = 0.0
    save_file(plain, model / "model.safetensors")
    import_checkpoint(model, tmp_path / "in", ParallelDims())
    export_checkpoint(tmp_path / "in", tmp_path / "out", quantization="fp8_channel")
    assert verify_weights(tmp_path / "in", tmp_path / "out") == []
    plain[DOWN][3, 5] = -0.0
    save_file(plain, model / "model.safetensors")
    [difference] = verify_weights(model, tmp_path / "out")
    assert (difference.tensor, difference.num_different) == (DOWN, 1)


def test_weights_that_do_not_divide_into_blocks_are_named(tmp_path):
    model = tiny_model(tmp_path / "model", "qwen3_moe", moe_intermediate_size=192, hidden_size=128)
    with pytest.raises(ValueError, match=re.escape("q_proj.weight [64, 128], ")) as raised:
        quantized_model("fp8", read_shape(model), "BF16")
    assert re.search(
        r"experts\.0\.up_proj\.weight \[192, 128\].* and \d+ more: use", str(raised.value)
    )
    assert "down_proj" not in str(raised.value)  # nothing is below it
    for scheme in ("fp8_channel", "int8"):
        assert quantized_model(scheme, read_shape(model), "BF16")


def test_a_weight_that_is_not_finite_is_refused_and_leaves_nothing(
    checkpoints, tmp_path, monkeypatch
):
    model, _, _ = checkpoints["qwen3"]
    (tmp_path / "model").mkdir()
    for file in model.iterdir():
        (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    weights = load_file(model / "model.safetensors")
    weights[DOWN][7, 9] = torch.nan
    save_file(weights, tmp_path / "model" / "model.safetensors")
    told = f"{DOWN} has values that are not finite"
    with pytest.raises(ValueError, match=rf"{told} \(NaN\), in .*model\.safetensors: "):
        import_checkpoint(tmp_path / "model", tmp_path / "in", ParallelDims())
    assert not (tmp_path / "in").exists()
    with monkeypatch.context() as patch:  # as it was saved
        patch.setattr(StoredTensors, "must_be_finite", False)
        import_checkpoint(tmp_path / "model", tmp_path / "in", ParallelDims())
    for quantization in ("none", "int8", "nvfp4"):
        with pytest.raises(ValueError, match=told):
            export_checkpoint(tmp_path / "in", tmp_path / "out", quantization=quantization)
        assert not (tmp_path / "out").exists()
