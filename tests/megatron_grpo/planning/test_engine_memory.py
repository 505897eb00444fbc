"""What engines hold: weights, and the cache of tokens and sequences."""

import re
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
from safetensors.torch import load_file

from checkpoint_convert import hf_tensors, read_shape
from checkpoint_convert.vllm import EngineDims
from helpers.engines.vllm_workers import read_in_workers
from helpers.models.images import PATCH_SIZES, tiny_vision_model
from helpers.models.published import write_config
from helpers.models.tiny import servable_model
from helpers.oracle.policies import tiny_config
from megatron_grpo.config.file import load_config
from megatron_grpo.config.trained_shape import trained_shape
from megatron_grpo.planning.card import CARDS
from megatron_grpo.planning.engine_memory import engine_bytes
from parallel import ParallelDims

CARD, LLAMA = CARDS["h100"], "Llama-3.1-8B"


@pytest.fixture
def engine_of(job_of):
    """An engine of a published model in bfloat16; overrides are of `rollout`."""

    def engine_of(model, *overrides, tensor=1, card=CARD):
        given = [f"rollout.{each}" for each in (f"tensor_parallel_size={tensor}", *overrides)]
        job = job_of(model, *given)
        return engine_bytes(job.cfg, job.shape, card)

    return engine_of


def test_engine_has_a_given_cache_or_the_rest_of_its_share(engine_of):
    given = "vllm.kv_cache_memory_bytes"
    assert engine_of(LLAMA, f"{given}=20G").cache == 20 * 2**30
    with pytest.raises(ValueError, match=rf"{given[5:]} is 70.*: use 131072 to 689\d+, or"):
        engine_of(LLAMA, f"{given}=70g")
    with pytest.raises(ValueError, match=r"rollout\.sglang\.kv_cache_memory_bytes is 1;"):
        engine_of(LLAMA, "engine=sglang", "vllm={}", "sglang.kv_cache_memory_bytes=1")
    half = "vllm.gpu_memory_utilization=0.5"
    engine = engine_of(LLAMA, half, tensor=2)
    # Half of what an H100 of "80 GB" has; CUDA context, NCCL and buffers of the push come on top.
    assert engine.weights + engine.cache == 42.5e9
    assert engine.total == 42.5e9 + 1.1e9 + 0.512e9
    assert engine.weights == pytest.approx(8_030_261_248, rel=1e-3)  # in two bytes, by half
    # 32 layers, 4 of 8 heads of 128, keys and values of two bytes, or of one.
    assert engine.cached_tokens == engine.cache // (32 * 4 * 128 * 2 * 2)
    twice = engine_of(LLAMA, half, "vllm.kv_cache_dtype=fp8_e4m3", tensor=2).cached_tokens
    assert twice == pytest.approx(2 * engine.cached_tokens, abs=1)


def test_engine_has_routers_with_biased_scores_in_float32(engine_of, job_of):
    weights = engine_of("GLM-4.5-Air", tensor=8).weights
    routers, norms = 45 * 128 * (4096 + 1), (2 * 46 + 1) * 4096
    others = sum(map(prod, hf_tensors(job_of("GLM-4.5-Air").shape).values())) - routers - norms
    assert weights == 2 * others / 8 + 2 * norms + 4 * routers


def test_engine_caches_latents_beside_an_indexer_in_8_bits_with_scales(engine_of):
    # 61 layers of 512 + 64 elements, in 8 bits with a scale for 128 and the 64 in 16 bits.
    for kind, latent in (("auto", 2 * (512 + 64)), ("fp8_e4m3", 512 + 4 * 4 + 2 * 64)):
        options = ["engine=sglang", "vllm={}", f"sglang.kv_cache_dtype={kind}"]
        engine = engine_of("DeepSeek-V3.2", *options, tensor=32)
        assert engine.token_bytes == 61 * (latent + 128 + 4)


@pytest.mark.parametrize(
    ("name", "tensor", "given", "message"),
    [
        ("Llama-3.3-70B", 1, "gpu_memory_utilization=0.9", r"141\.1 GB .* of 85 GB: set it to 2$"),
        ("Llama-3.1-405B", 4, "kv_cache_memory_bytes=1000000000", r"202.* to 16, 2 nodes of 8$"),
    ],
)
def test_engine_that_gpus_do_not_hold_is_refused_with_the_fewest_that_do(
    name, tensor, given, message, engine_of
):
    with pytest.raises(ValueError, match=message) as refused:
        engine_of(name, f"vllm.{given}", tensor=tensor)
    [said] = re.findall(r"set it to (\d+)", str(refused.value))
    assert engine_of(name, f"vllm.{given}", tensor=said).cache > 0


def test_engine_that_no_number_of_gpus_holds_is_refused_with_larger_ones(engine_of):
    # 32 GPUs each have a 32nd of the weights and one of 8 key-value heads.
    error = r"as at most 32 GPUs can split.*\(--gpu\) of more than 1 GB"
    with pytest.raises(ValueError, match=error):
        engine_of(LLAMA, card=replace(CARD, memory=500 * 10**6))


@pytest.mark.parametrize("family", PATCH_SIZES)
def test_engine_has_a_tower_that_is_trained_by_a_push(tmp_path, family):
    folder = tiny_vision_model(tmp_path, family)
    frozen, trained = (
        tiny_config(folder, ParallelDims(), "data.image_column=image", f"model.freeze_vision={x}")
        for x in ("true", "false")
    )
    stored = load_file(folder / "model.safetensors")
    tower = sum(4 * values.numel() for name, values in stored.items() if "visual." in name)
    before, engine = (engine_bytes(x, trained_shape(x), CARD) for x in (frozen, trained))
    assert engine.weights == engine.pushed == before.weights == before.pushed + tower
    halves = "rollout.tensor_parallel_size=2"
    images, text = (
        engine_bytes(tiny_config(folder, ParallelDims(), halves, *more), read_shape(folder), CARD)
        for more in (["data.image_column=image"], [])
    )
    assert (images.weights, images.pushed) == (text.weights + tower // 2, text.pushed)


def cache_and_weights(model, folder, dims):
    """Bytes that this worker caches per token, and bytes of all its parameters."""
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    layers = [module for module in model.modules() if isinstance(module, MLAAttention)]
    specs = [layer.get_kv_cache_spec(layer._vllm_config) for layer in layers]
    storages = [parameter.untyped_storage() for parameter in model.parameters()]
    return (
        sum(spec.page_size_bytes / spec.block_size for spec in specs),
        sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()),
    )


@pytest.mark.long
def test_engine_of_vllm_caches_latents_whole_in_every_worker(tmp_path):
    # To attend to latents, vLLM registers two parts of the projection from latents to keys and
    # values as parameters: views, which need no memory.
    folder = servable_model(tmp_path, "deepseek_v3")
    [workers] = read_in_workers([(folder, EngineDims(tensor=2))], cache_and_weights, "bfloat16")
    two = "rollout.tensor_parallel_size=2"
    cfg = tiny_config(folder, ParallelDims(), "model.dtype=bfloat16", two)
    engine = engine_bytes(cfg, read_shape(folder), CARD)
    assert workers == [(engine.token_bytes, engine.weights)] * 2
    assert engine.token_bytes == 2 * 3 * (512 + 64)


# Weights of 8 bits


@pytest.fixture
def quantized_engine(tmp_path):
    """An engine of a shipped config."""

    def quantized_engine(published, quantization, config="70b", *overrides, **differing):
        path = write_config(tmp_path, published, **differing)
        given = [f"model.path={path}", f"rollout.quantization={quantization}", *overrides]
        cfg = load_config(Path(f"configs/grpo_{config}.yaml"), given)
        return engine_bytes(cfg, trained_shape(cfg), CARD)

    return quantized_engine


@pytest.mark.parametrize("quantization", ["fp8", "fp8_channel", "int8"])
def test_quantized_engine_has_half_of_the_weights_and_more_tokens(quantized_engine, quantization):
    whole, half = (quantized_engine("Llama-3.3-70B", each) for each in ("none", quantization))
    ends = 2 * 2 * 128_256 * 8_192 // 8  # in bfloat16, on 8 workers
    assert half.weights - ends == pytest.approx((whole.weights - ends) / 2, rel=1e-3)
    assert half.pushed == half.weights
    assert half.cached_tokens > 1.1 * whole.cached_tokens


def test_quantized_engine_has_excluded_modules_in_16_bits(quantized_engine):
    half = quantized_engine("Llama-3.3-70B", "fp8").weights
    for left_out, layers in ((r"re:.*\.down_proj", 80), (r"re:model\.layers\.7\..*\.down_proj", 1)):
        ignored = f"rollout.quantization_ignore=['{left_out}']"
        found = quantized_engine("Llama-3.3-70B", "fp8", "70b", ignored).weights
        assert found - half == layers * 8_192 * 28_672 // 8


def test_quantized_engine_has_latents_projections_twice(quantized_engine):
    """The first five layers of DeepSeek-V3 on engines of 16 workers."""
    views = "rollout.quantization_ignore=['re:.*\\.kv_b_proj']"
    whole, half, left_out = (
        quantized_engine("DeepSeek-V3", each, "671b_a37b", *more, num_hidden_layers=5)
        for each, more in (("none", []), ("fp8", []), ("fp8", [views]))
    )
    head_and_embedding = 2 * 2 * 129_280 * 7_168 // 16
    routers = 2 * 2 * 256 * 7_168
    halved = whole.weights - head_and_embedding - routers
    assert half.pushed == pytest.approx(halved / 2 + head_and_embedding + routers, rel=2e-3)
    assert half.weights == half.pushed + 2 * 5 * 512 * 128 * (128 + 128) // 16
    assert left_out.weights == left_out.pushed


def test_quantization_saves_as_much_of_the_drafting_layer_as_of_another(quantized_engine):
    def saved(num_layers, *overrides):
        options = "671b_a37b", "model.dtype=bfloat16", *overrides
        whole, half = (
            quantized_engine("DeepSeek-V3", each, *options, num_hidden_layers=num_layers).weights
            for each in ("none", "fp8")
        )
        return whole - half

    drafts = "rollout.vllm.speculative_config={method: mtp, num_speculative_tokens: 1}"
    assert saved(5, drafts, "model.mtp_num_layers=1") == saved(6) > saved(5)


@pytest.mark.parametrize(
    ("published", "quantization", "config", "copied"),
    [
        ("Qwen3-235B-A22B", "none", "235b_a22b", 0),
        ("Qwen3-235B-A22B", "fp8", "235b_a22b", 0),
        ("DeepSeek-V3", "none", "671b_a37b", 512 * 128 * (128 + 128)),
        ("DeepSeek-V3", "fp8", "671b_a37b", 512 * 128 * (128 + 128)),
        # SGLang has two matrices for indexers, vLLM has one.
        ("DeepSeek-V3.2", "none", "671b_a37b", 512 * 128 * (128 + 128)),
    ],
)
def test_quantized_engine_of_sglang_equals_that_of_vllm(
    quantized_engine, published, quantization, config, copied
):
    """Except that SGLang always copies the projection of latents to keys and values."""
    of_vllm, of_sglang = (
        quantized_engine(
            published,
            quantization,
            config,
            "rollout.tensor_parallel_size=4",
            *more,
            num_hidden_layers=4,
        )
        for more in ([], ["rollout.engine=sglang", "rollout.vllm={}"])
    )
    are_views = quantization == "none"
    assert of_sglang.weights == of_vllm.weights + are_views * 2 * 4 * copied // 4
    assert of_sglang.pushed == of_vllm.pushed
