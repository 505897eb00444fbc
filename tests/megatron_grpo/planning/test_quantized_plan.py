"""What a plan counts of engines with weights of 8 bits."""

from pathlib import Path

import pytest

from checkpoint_convert import read_shape
from helpers.models.published import write_config
from megatron_grpo.config.file import load_config
from megatron_grpo.planning.card import CARDS
from megatron_grpo.planning.engine_memory import EngineBytes, engine_bytes


def engine(
    folder: Path,
    published: str,
    quantization: str,
    config: str = "70b",
    *overrides: str,
    **differing: int,
) -> EngineBytes:
    path = write_config(folder / published, published, **differing)
    given = [f"model.path={path}", f"rollout.quantization={quantization}", *overrides]
    cfg = load_config(Path(f"configs/grpo_{config}.yaml"), given)
    found = engine_bytes(cfg, read_shape(path), CARDS["h100"])
    assert found is not None
    return found


@pytest.mark.parametrize("quantization", ["fp8", "fp8_channel", "int8"])
def test_half_of_the_weights_leaves_room_for_more_tokens(tmp_path, quantization):
    whole, half = (engine(tmp_path, "Llama-3.3-70B", each) for each in ("none", quantization))
    head_and_embedding = 2 * 2 * 128_256 * 8_192 // 8  # in bfloat16, on 8 workers
    assert half.weights - head_and_embedding == pytest.approx(
        (whole.weights - head_and_embedding) / 2, rel=1e-3
    )
    assert half.pushed == half.weights
    assert half.cached_tokens > 1.1 * whole.cached_tokens


def test_what_is_left_out_is_counted_in_16_bits(tmp_path):
    left_out = "rollout.quantization_ignore=['re:.*\\.down_proj']"
    model = tmp_path, "Llama-3.3-70B"
    found, half = (engine(*model, "fp8", "70b", *each).weights for each in ([left_out], []))
    assert found - half == 80 * 8_192 * 28_672 // 8
    left_out = "rollout.quantization_ignore=['re:model\\.layers\\.7\\..*\\.down_proj']"
    assert engine(*model, "fp8", "70b", left_out).weights - half == 8_192 * 28_672 // 8


def test_experts_are_counted_in_8_bits_and_latents_twice(tmp_path):
    """The first five layers of DeepSeek-V3 on engines of 16 workers."""
    model = tmp_path, "DeepSeek-V3"
    whole, half = (
        engine(*model, each, "671b_a37b", num_hidden_layers=5) for each in ("none", "fp8")
    )
    head_and_embedding = 2 * 2 * 129_280 * 7_168 // 16
    routers = 2 * 2 * 256 * 7_168
    halved = whole.weights - head_and_embedding - routers
    assert half.pushed == pytest.approx(halved / 2 + head_and_embedding + routers, rel=2e-3)
    made = 2 * 5 * 512 * 128 * (128 + 128) // 16
    assert half.weights == half.pushed + made
    views = "rollout.quantization_ignore=['re:.*\\.kv_b_proj']"
    left_out = engine(*model, "fp8", "671b_a37b", views, num_hidden_layers=5)
    assert left_out.weights == left_out.pushed


@pytest.mark.parametrize(
    ("published", "quantization", "config", "copied"),
    [
        ("Qwen3-235B-A22B", "none", "235b_a22b", 0),
        ("Qwen3-235B-A22B", "fp8", "235b_a22b", 0),
        ("DeepSeek-V3", "none", "671b_a37b", 512 * 128 * (128 + 128)),
        ("DeepSeek-V3", "fp8", "671b_a37b", 512 * 128 * (128 + 128)),
        # Of whose indexers it has two matrices, where vLLM has one.
        ("DeepSeek-V3.2", "none", "671b_a37b", 512 * 128 * (128 + 128)),
    ],
)
def test_an_engine_of_sglang_is_counted_as_one_of_vllm(
    tmp_path, published, quantization, config, copied
):
    """But that it always copies what projects latents up."""
    size = "rollout.tensor_parallel_size=4"
    model = tmp_path, published, quantization, config, size
    of_sglang = engine(*model, "rollout.engine=sglang", "rollout.vllm={}", num_hidden_layers=4)
    of_vllm = engine(*model, num_hidden_layers=4)
    are_views = quantization == "none"
    assert of_sglang.weights == of_vllm.weights + are_views * 2 * 4 * copied // 4
    assert of_sglang.pushed == of_vllm.pushed
