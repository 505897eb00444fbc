"""The layers that `lora` names, and refusals."""

import pytest

from checkpoint_convert import read_shape
from helpers.models.tiny import tiny_model
from megatron_grpo.config.file import load_config
from megatron_grpo.config.lora import LoraConfig
from megatron_grpo.engines.vllm.args import check_adapters
from megatron_grpo.policy.lora_targets import check_lora, targets_of
from tests.megatron_grpo.config.test_config import DEMO, refusal


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    families = ("llama", "deepseek_v3")
    return {name: read_shape(tiny_model(folder / name, name)) for name in families}


def test_all_linear_is_all_but_embedding_and_head_less_the_excluded(shapes):
    found = targets_of(LoraConfig(r=1), shapes["llama"])
    ends = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert [name.rpartition(".")[2] for name in found] == ends * 2
    fewer = LoraConfig(r=1, exclude_modules=("k_proj", "layers.1.mlp.up_proj"))
    assert {*found} - {*targets_of(fewer, shapes["llama"])} == {
        "model.layers.0.self_attn.k_proj",
        "model.layers.1.self_attn.k_proj",
        "model.layers.1.mlp.up_proj",
    }


def test_the_scale_is_pefts():
    assert LoraConfig(r=4, lora_alpha=8.0).scale == 2
    assert LoraConfig(r=4, lora_alpha=8.0, use_rslora=True).scale == 4


@pytest.mark.parametrize(
    ("family", "given", "error"),
    [
        ("llama", {"target_modules": ("q_prj",)}, "no linear layer q_prj .* did you mean q_proj"),
        (
            "llama",
            {"target_modules": ("o_proj",), "exclude_modules": ("upp",)},
            "exclude_.* up_proj",
        ),
        ("llama", {"target_modules": ("embed_tokens",)}, "names model.embed_tokens, which cannot"),
        ("llama", {"target_modules": ("layers.1.mlp.up_proj",)}, "to 1 of 2 layers"),
        (
            "llama",
            {
                "exclude_modules": (
                    "self_attn.q_proj",
                    "k_proj",
                    "v_proj",
                    "o_proj",
                    "gate_proj",
                    "up_proj",
                    "down_proj",
                )
            },
            "leaves no layer",
        ),
        ("deepseek_v3", {}, r"names model.layers.1.mlp.experts.0.gate_proj, which cannot"),
        ("deepseek_v3", {"target_modules": ("up_proj",)}, "experts.0.up_proj, which cannot"),
        ("deepseek_v3", {"target_modules": ("o_proj", "gate")}, "mlp.gate, which cannot"),
    ],
)
def test_what_cannot_have_an_adapter_is_refused_by_name(shapes, family, given, error):
    with pytest.raises(ValueError, match=error):
        check_lora(LoraConfig(r=1, **given), shapes[family], 1)


def test_each_tensor_rank_needs_rows_of_a_target(shapes):
    with pytest.raises(ValueError, match="4 is above the model's 2 key-value heads"):
        check_lora(LoraConfig(r=1, target_modules=("q_proj", "v_proj")), shapes["llama"], 4)
    check_lora(LoraConfig(r=1), shapes["llama"], 4)
    check_lora(LoraConfig(target_modules=("anything",)), shapes["llama"], 4)  # r is 0


@pytest.mark.parametrize(
    ("override", "error"),
    [
        ("lora.modules_to_save=[lm_head]", "have adapters or stay as they are"),
        ("lora.sync=full", "lora.sync"),
    ],
)
def test_unsupported_keys_of_peft_are_refused(override, error):
    assert error in refusal("lora.r=2", override)


def test_what_vllm_does_not_serve_is_refused(shapes):
    check_adapters(LoraConfig(r=512), shapes["llama"])
    with pytest.raises(ValueError, match=r"of rank 512 at most, not 513: set lora\.sync=merged"):
        check_adapters(LoraConfig(r=513), shapes["llama"])
    with pytest.raises(ValueError, match=r"latent attention here: set lora\.sync=merged"):
        check_adapters(LoraConfig(r=8), shapes["deepseek_v3"])
    check_adapters(LoraConfig(r=513, sync="merged"), shapes["deepseek_v3"])


def test_names_and_initializations_are_read_from_a_config():
    given = ["lora.r=2", "lora.target_modules=[q_proj]", "lora.init_lora_weights=gaussian"]
    found = load_config(DEMO, given).lora
    assert (found.target_modules, found.init_lora_weights) == (("q_proj",), "gaussian")
    assert "lora.r" in refusal("lora.r=-1")
