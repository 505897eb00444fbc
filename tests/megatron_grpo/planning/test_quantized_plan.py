"""What a plan counts of engines with weights of 8 bits, and where it suggests them."""

from pathlib import Path
from typing import Any

import pytest

from checkpoint_convert import read_shape
from helpers.published_models import PUBLISHED_MODELS, write_config
from megatron_grpo.config.file import load_config
from megatron_grpo.planning.card import CARDS
from megatron_grpo.planning.command import print_suggestions
from megatron_grpo.planning.engine_memory import EngineBytes, engine_bytes
from megatron_grpo.planning.job_plan import plan_job
from megatron_grpo.planning.quantized_engines import EngineOption, engine_options
from megatron_grpo.planning.suggest import suggest
from megatron_grpo.planning.workload import Job


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


SMALL = "grpo.generation_batch_size=128", "rollout.max_staleness=0"


def options(
    folder: Path, published: str, *overrides: str, gpu: str = "h100", **differing: Any
) -> tuple[list[EngineOption], list[str]]:
    """Engines of 4 GPUs that could be quantised beside 4 ranks, and the config's overrides."""
    path = write_config(folder / published, published, **{"num_hidden_layers": 4} | differing)
    given = [f"model.path={path}", *SMALL, *LAYOUT, *overrides]
    cfg, shape, card = load_config(CONFIG, given), read_shape(path), CARDS[gpu]
    first = suggest(Job(cfg, shape, card, [8192], 8))[0]
    return engine_options(first, Job(cfg, shape, card, [8192], 8)), given


CONFIG = Path("configs/grpo_235b_a22b.yaml")
LAYOUT = (
    "rollout.num_engines=1",
    "rollout.tensor_parallel_size=4",
    "parallel.tensor_parallel_size=1",
    "parallel.pipeline_parallel_size=1",
    "parallel.expert_parallel_size=4",
)
UNCORRECTED = "grpo.rollout_importance_sampling_mode=null"


def test_suggested_engines_of_8_bits_can_be_pasted_and_have_fewer_gpus_or_more_room(
    tmp_path, capsys
):
    (plain, *found), given = options(tmp_path, "Qwen3-235B-A22B", UNCORRECTED)
    assert plain.overrides == [] and plain.gpus_per_engine == 4
    assert [each.gpus_per_engine for each in found] == [4, 2, 1]
    same, half, _ = found
    assert same.cached_tokens > plain.cached_tokens
    assert same.generation_seconds < plain.generation_seconds
    head_and_embedding = 2 * 2 * 151_936 * 4_096  # in bfloat16, on 2 workers instead of 4
    assert half.weights - plain.weights == head_and_embedding // 4
    shape = read_shape(tmp_path / "Qwen3-235B-A22B")
    for each in found:
        assert each.overrides[-1] == "grpo.rollout_importance_sampling_mode=token_truncate"
        pasted = load_config(CONFIG, [*given, *each.overrides])
        assert pasted.grpo.corrects_rollouts
        planned = plan_job(Job(pasted, shape, CARDS["h100"], [8192], 8)).engine
        assert (each.weights, each.cached_tokens) == (planned.weights, planned.cached_tokens)
    corrected, given = options(tmp_path, "Qwen3-235B-A22B")
    print_suggestions(
        load_config(CONFIG, given), gpu="h100", num_gpus=8, lengths_file=None, as_json=False
    )
    shown = capsys.readouterr().out.splitlines()
    for each in corrected[1:]:
        assert sum(line.endswith("  " + " ".join(each.overrides)) for line in shown) == 1
    assert "grpo." not in " ".join(word for each in corrected for word in each.overrides)


def test_blocks_that_workers_would_cut_and_cards_without_fp8_get_another_scheme(tmp_path):
    cut, _ = options(tmp_path, "Qwen3-235B-A22B", moe_intermediate_size=1280)
    schemes = [each.overrides[0].partition("=")[2] for each in cut[1:]]
    assert schemes == ["fp8_channel", "fp8", "fp8"]  # 4 workers would have 320 rows each
    without, _ = options(tmp_path, "Qwen3-235B-A22B", gpu="a100")
    assert {each.overrides[0] for each in without[1:]} == {"rollout.quantization=int8"}


@pytest.mark.parametrize(
    ("published", "override"),
    [
        ("Qwen3-Next-80B-A3B", SMALL[0]),  # linear attention
        ("Qwen3-VL-30B-A3B", SMALL[0]),  # another tower
        ("Qwen3-30B-A3B", "rollout.router_replay=true"),
        ("Qwen3-30B-A3B", "rollout.quantization=int8"),  # which it has already
    ],
)
def test_engines_that_cannot_be_quantised_are_not_suggested(tmp_path, published, override):
    text = PUBLISHED_MODELS[published].get("text_config")
    fewer = {"text_config": text | {"num_hidden_layers": 4}} if text else {}
    assert options(tmp_path, published, override, **fewer)[0] == []
