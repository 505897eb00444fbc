"""New weights in a running vLLM."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint_convert.families import FAMILIES
from checkpoint_convert.families.multimodal import MULTIMODAL
from checkpoint_convert.vllm import EngineDims
from helpers.engines.live import (
    largest_logprob_error,
    random_prompts,
    reference_logprobs,
    running_engine,
)
from helpers.engines.vllm_workers import loaded_parameters
from helpers.models.conversions import assert_same
from helpers.models.images import (
    IMAGE_LIMITS,
    PATCH_SIZES,
    picture,
    prompts_with_images,
    tiny_vision_model,
)
from helpers.models.quantized import FORMATS, dequantized_copy, quantized_copy, rounded_copy
from helpers.models.tiny import mixture_of_blocks, servable_model, stacked_experts
from helpers.models.towers import tiny_multimodal


def check_pushes(engine, *folders) -> None:
    # The same prompts each time, longer than a block of the prefix cache: a cache that outlived its
    # weights would show.
    prompts = random_prompts(4, lengths=(70, 100))
    for folder in folders:
        version = engine.push(folder)
        samples = engine.generate(prompts)
        assert {s.policy_version for s in samples} == {version}
        assert largest_logprob_error(folder, samples) < 1e-4


def test_push_replaces_the_weights(live_engine, tied_model, other_model):
    check_pushes(live_engine, tied_model, other_model, tied_model)


slow = pytest.mark.slow
WEIGHTS = "model.safetensors"
QWEN_WINDOWS = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 0}
DENSE = [name for name, each in FAMILIES.items() if not (each.experts or each.linear)]
OVERRIDES = {
    # Windows shorter than the prompts, in some layers or in all.
    "olmo3": {"num_hidden_layers": 4},
    "mistral": {"sliding_window": 20},
    "gemma3_text": {"tied": True, "num_hidden_layers": 3},
    "qwen3": {"tied": True},
}
ON_TWO = ("olmo2", "olmo3", "phi3", "qwen3")
"""Families that two workers share."""
EXPERTS_OF_GROUPS = {"data_parallel_size": 2, "vllm": {"enable_expert_parallel": True}}
ENGINES = [
    ("deepseek_v3", {}, {}),  # latent attention and experts
    *(
        (name, OVERRIDES.get(name, {}), {"tensor_parallel_size": 1 + (name in ON_TWO)})
        for name in DENSE
    ),
    ("deepseek_v3", {"q_lora_rank": None}, {"tensor_parallel_size": 2}),
    ("qwen3", QWEN_WINDOWS, {}),
    ("qwen3_moe", {"tied": False}, {}),
    ("qwen3_moe", {}, EXPERTS_OF_GROUPS),
    ("glm4_moe", {"tied": False}, {}),
    # Sinks and windows in every other layer; rows of gate and up alternate in the engine.
    ("gpt_oss", {"sliding_window": 20}, {"tensor_parallel_size": 2}),
    ("glm4_moe_lite", {}, {"tensor_parallel_size": 2}),
    ("qwen3_5_text", {"tied": True}, {"tensor_parallel_size": 2}),
    ("qwen3_5_moe_text", {}, {"tensor_parallel_size": 2}),
    *((kind, {}, {}) for kind in MULTIMODAL),  # their text towers
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "overrides", "sizes"),
    [ENGINES[0], *(pytest.param(*row, marks=slow) for row in ENGINES[1:])],
)
def test_workers_take_their_shards_of_every_family(tmp_path, family, overrides, sizes):
    make = tiny_multimodal if family in MULTIMODAL else servable_model
    folder = make(tmp_path / "model", family, **overrides)
    other = make(tmp_path / "other", family, seed=1, **overrides)
    if family == "qwen3_5_moe_text":
        folder = stacked_experts(folder, tmp_path / "stacked")
    with running_engine("vllm", folder, tmp_path, **sizes) as engine:
        check_pushes(engine, other, folder)


@slow
@pytest.mark.parametrize("family", PATCH_SIZES)
def test_the_engine_sees_the_images_that_the_trainer_sees(tmp_path, family):
    folder = tiny_vision_model(tmp_path / "model", family)
    other = tiny_vision_model(tmp_path / "other", family, seed=1)
    tower = {n: x for n, x in load_file(folder / WEIGHTS).items() if "visual." in n}  # not pushed
    save_file(load_file(other / WEIGHTS) | tower, other / WEIGHTS, {"format": "pt"})
    for seed, size in enumerate([(60, 90), (56, 56), (200, 100)]):
        picture(*size, seed).save(tmp_path / f"{seed}.png")
    images = [["0.png", "1.png"], "2.png", None, "1.png"]
    prompts = prompts_with_images(folder, tmp_path, images)
    with running_engine("vllm", folder, tmp_path, vllm=IMAGE_LIMITS) as engine:
        for weights in (folder, other):
            engine.push(weights)
            samples = engine.generate(prompts)
            assert largest_logprob_error(weights, samples) < 1e-5


@slow
@pytest.mark.parametrize(
    ("family", "scheme", "bound"),
    # In bfloat16 the mean is 0.08, as rounding chooses experts of random routers; tokens in FP8
    # (`fp8_channel` only) choose more of them. Other weights differ by 3.
    [
        ("deepseek_v3", "fp8", 0.15),
        ("deepseek_v3", "int8", 0.15),
        ("qwen3_moe", "fp8_channel", 0.4),
        ("qwen3_moe", "int8", 0.15),
    ],
)
def test_a_quantised_mixture_generates_as_its_dequantised_copy(tmp_path, family, scheme, bound):
    """Products of experts, and decode steps with latents, in weights of 8 bits."""
    folder = mixture_of_blocks(tmp_path / "model", family)
    other = mixture_of_blocks(tmp_path / "other", family, seed=1)
    plain = rounded_copy(other, tmp_path / "plain", scheme)
    sizes = {"dtype": "bfloat16", "quantization": scheme}
    with running_engine("vllm", folder, tmp_path / "logs", **sizes) as engine:
        engine.push(other)
        samples = engine.generate(random_prompts(4, lengths=(30, 60)))
    differences = torch.cat(
        [reference_logprobs(plain, s) - torch.tensor(s.logprobs) for s in samples]
    ).abs()
    assert len(differences) > 100
    assert differences.mean() < bound


@pytest.mark.long
@pytest.mark.parametrize("form", [pytest.param("DeepSeek", marks=slow), "ModelOpt FP8"])
def test_workers_load_a_quantised_folder_as_its_dequantised_copy(tmp_path, form):
    model = servable_model(tmp_path / "model", "qwen3_moe")
    quantized = quantized_copy(model, tmp_path / "quantized", FORMATS[form])
    plain = dequantized_copy(quantized, tmp_path / "plain", FORMATS[form])
    dims = EngineDims(tensor=2)
    loaded = loaded_parameters([(quantized, dims), (plain, dims)], dtype="bfloat16")
    for of_quantized, of_plain in zip(*loaded, strict=True):
        assert_same(of_quantized, of_plain)
