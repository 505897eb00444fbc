"""The planner's worst phase compared with the memory of real ranks, and what engines leave."""

import ctypes
import re
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import pytest
from safetensors.torch import load_file

from checkpoint_convert import hf_tensors, read_shape
from checkpoint_convert.vllm import EngineDims
from helpers.engines.vllm_workers import read_in_workers
from helpers.models.images import FAMILY, PATCH_SIZES, tiny_vision_model
from helpers.models.published import write_config
from helpers.models.tiny import servable_model, tiny_model
from helpers.oracle.policies import Lengths, accumulate, pack_all, tiny_config
from helpers.ranks.processes import run_ranks
from megatron_grpo.config.config import Config
from megatron_grpo.config.trained_shape import trained_shape
from megatron_grpo.planning.card import CARDS, GpuSpec
from megatron_grpo.planning.engine_memory import EngineBytes, engine_bytes
from megatron_grpo.planning.memory import stages_memory
from megatron_grpo.planning.state import stage_states
from megatron_grpo.planning.workload import Job
from megatron_grpo.policy.lora import add_adapters
from megatron_grpo.policy.model import add_gradients, add_optimizer, build_model
from parallel import ParallelDims
from parallel.cpu_device import setup_device
from parallel.groups import init_groups

M_MMAP_THRESHOLD = -3
SHORT, LONG = [[(64, 192), (32, 96), (32, 96)]] * 3, [[(64, 448)] * 16] * 3


def resident(key: str) -> int:
    """Resident bytes of this process: current (VmRSS) or peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) * 1024


@dataclass(frozen=True)
class Taken:
    """Bytes of a rank."""

    state: int
    activations: int
    """At the peak of an optimizer step, in addition to its state."""


def measure(rank: int, cfg: Config, lengths: Lengths) -> Taken:
    """What this rank's process takes to train on its microbatches."""
    # Every tensor by itself, and given back at once: nothing of what is freed is still resident.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
    setup_device(rank)
    groups, shape = init_groups(cfg.dims), read_shape(cfg.model.path)
    empty = resident("VmRSS")
    model = build_model(cfg, shape, groups)
    if cfg.lora.r:
        model.adapters = add_adapters(model.chunks, shape, model.layout, cfg.lora, groups, seed=0)
    add_gradients(model, cfg)
    policy = add_optimizer(model, cfg, groups)
    for parameter in policy.parameters().values():
        parameter.data.uniform_(-0.02, 0.02)
    batches = pack_all(lengths, cfg.dims)
    # The first touches the gradients' memory: a microbatch of any length does.
    accumulate(policy, groups, pack_all([[(4, 4)]], cfg.dims))
    Path("/proc/self/clear_refs").write_text("5")  # the most begins anew
    before = resident("VmRSS")
    accumulate(policy, groups, batches)
    return Taken(before - empty, resident("VmHWM") - before)


def planned_and_measured(
    folder: Path, dims: ParallelDims, lengths: Lengths, *overrides: str
) -> tuple[list[Taken], list[Taken]]:
    """Of every rank, one per stage."""
    cfg = tiny_config(
        folder,
        dims,
        f"train.max_tokens_per_microbatch={sum(map(sum, lengths[0]))}",
        "model.megatron.transformer_impl=local",
        "grpo.beta=0",
        *overrides,
    )
    shape = read_shape(cfg.model.path)
    states = list(stage_states(cfg, shape))
    stages = stages_memory(
        Job(cfg, shape, CARDS["h100"], []), states, len(lengths), None, device="cpu"
    )
    planned = [Taken(stage.state.total, stage.phases["train"]) for stage in stages]
    return planned, run_ranks(dims.world_size, measure, cfg, lengths)


@pytest.mark.parametrize(
    ("pipeline", "num_layers"),
    [
        pytest.param(
            2, 10, marks=pytest.mark.slow
        ),  # a third of its layers, with the head and the widths of all
        pytest.param(2, 30, marks=pytest.mark.slow),
    ],
)
def test_activations_of_smollm2_are_what_a_process_takes(pipeline, num_layers, tmp_path):
    folder = write_config(tmp_path, "SmolLM2-135M", num_hidden_layers=num_layers)
    for planned, measured in zip(
        *planned_and_measured(folder, ParallelDims(pipeline=pipeline), SHORT), strict=True
    ):
        assert measured.activations == pytest.approx(planned.activations, rel=0.05)


@pytest.mark.slow
def test_adapters_take_as_much_less_than_all_weights_as_is_planned(tmp_path):
    """What a process takes beside the model's state is the same in both, some 50 MB."""
    folder, dims = write_config(tmp_path, "SmolLM2-135M", num_hidden_layers=10), ParallelDims()
    planned, measured = planned_and_measured(folder, dims, SHORT)
    for_adapters, of_adapters = planned_and_measured(folder, dims, SHORT, "lora.r=16")
    for has, expected in zip(of_adapters, for_adapters, strict=True):
        assert has.activations == pytest.approx(expected.activations, rel=0.05)
    less, expected = (
        full[0].state - adapters[0].state
        for full, adapters in ((measured, of_adapters), (planned, for_adapters))
    )
    assert less == pytest.approx(expected, rel=0.05)
    assert of_adapters[0].state < 0.35 * measured[0].state


@pytest.mark.slow
def test_activations_of_the_tiny_model_are_what_a_process_takes(tmp_path):
    folder = tiny_model(tmp_path, "qwen3", head_dim=32)
    [planned], [measured] = planned_and_measured(folder, ParallelDims(), LONG)
    assert measured.activations == pytest.approx(planned.activations, rel=0.15)


def engine_of(
    folder: Path, model: str, *overrides: str, tensor: int = 1, card: GpuSpec = CARDS["h100"]
) -> EngineBytes:
    """An engine of a published model in bfloat16; overrides are of `rollout`."""
    write_config(folder, model)
    options = [f"rollout.{each}" for each in (f"tensor_parallel_size={tensor}", *overrides)]
    cfg = tiny_config(folder, ParallelDims(), "model.dtype=bfloat16", *options)
    return engine_bytes(cfg, read_shape(folder), card)


def test_an_engine_has_a_given_cache_or_the_rest_of_its_share(tmp_path):
    given = "vllm.kv_cache_memory_bytes"
    assert engine_of(tmp_path, "Llama-3.1-8B", f"{given}=20G").cache == 20 * 2**30
    with pytest.raises(ValueError, match=rf"{given[5:]} is 70.*: use 131072 to 689\d+, or"):
        engine_of(tmp_path, "Llama-3.1-8B", f"{given}=70g")
    half = "vllm.gpu_memory_utilization=0.5"
    engine = engine_of(tmp_path, "Llama-3.1-8B", half, tensor=2)
    # Half of what an H100 of "80 GB" has; CUDA context, NCCL and buffers of the push come on top.
    assert engine.weights + engine.cache == 42.5e9
    assert engine.total == 42.5e9 + 1.1e9 + 0.512e9
    assert engine.weights == pytest.approx(8_030_261_248, rel=1e-3)  # half of it, in two bytes
    # 32 layers, 4 of 8 heads of 128, keys and values of two bytes, or of one.
    assert engine.cached_tokens == engine.cache // (32 * 4 * 128 * 2 * 2)
    of_8_bits = "vllm.kv_cache_dtype=fp8_e4m3"
    twice = engine_of(tmp_path, "Llama-3.1-8B", half, of_8_bits, tensor=2).cached_tokens
    assert twice == pytest.approx(2 * engine.cached_tokens, abs=1)


def test_an_engine_holds_routers_that_choose_by_biased_scores_in_float32(tmp_path):
    weights = engine_of(tmp_path, "GLM-4.5-Air", tensor=8).weights
    routers, norms = 45 * 128 * (4096 + 1), (2 * 46 + 1) * 4096
    others = sum(map(prod, hf_tensors(read_shape(tmp_path)).values())) - routers - norms
    assert weights == 2 * others / 8 + 2 * norms + 4 * routers


def test_where_workers_outnumber_key_value_heads_each_holds_and_caches_one_whole(tmp_path):
    engine = engine_of(tmp_path, "Llama-3.1-405B", tensor=32)
    hidden, layers, vocabulary = 16384, 126, 128256
    split = layers * (2 * hidden * 128 * 128 + 3 * hidden * 53248) + 2 * vocabulary * hidden
    whole = layers * 2 * hidden * 128 + (2 * layers + 1) * hidden  # keys, values; norms
    assert engine.weights == 2 * (split // 32 + whole)
    assert engine.token_bytes == layers * 2 * 128 * 2


def test_of_linear_attention_an_engine_caches_a_memory_per_sequence_and_no_tokens(tmp_path):
    engine = engine_of(tmp_path, "Qwen3-Next-80B-A3B", tensor=4)
    # Keys and values of 12 layers, one of two heads of 256. In 36 layers three tokens of what is
    # convolved, and 32 heads' float32 matrices.
    assert engine.token_bytes == 12 * 2 * 256 * 2
    assert engine.sequence_bytes == 36 * (3 * 8192 * 2 + 32 * 128 * 128 * 4) // 4
    drafts = "vllm.speculative_config={method: ngram, num_speculative_tokens: 2}"
    engine = engine_of(tmp_path, "Qwen3-Next-80B-A3B", drafts, tensor=4)
    # Both after each token of a draft, too, and its two tokens with what is convolved.
    assert engine.sequence_bytes == 3 * 36 * ((3 + 2) * 8192 * 2 + 32 * 128 * 128 * 4) // 4


def test_latents_beside_an_indexer_are_cached_in_8_bits_with_scales(tmp_path):
    # 61 layers of 512 + 64 elements, in 8 bits with a scale for 128 and the 64 in 16 bits.
    for kind, latent in (("auto", 2 * (512 + 64)), ("fp8_e4m3", 512 + 4 * 4 + 2 * 64)):
        options = ["engine=sglang", "vllm={}", f"sglang.kv_cache_dtype={kind}"]
        engine = engine_of(tmp_path, "DeepSeek-V3.2", *options, tensor=32)
        assert engine.token_bytes == 61 * (latent + 128 + 4)


@pytest.mark.parametrize(
    ("name", "tensor", "given", "message"),
    [
        ("Llama-3.3-70B", 1, "gpu_memory_utilization=0.9", r"141\.1 GB .* of 85 GB: set it to 2$"),
        ("Llama-3.1-405B", 4, "kv_cache_memory_bytes=1000000000", r"202.* to 16, 2 nodes of 8$"),
    ],
)
def test_weights_that_gpus_do_not_hold_are_refused_with_the_fewest_gpus_that_do(
    name, tensor, given, message, tmp_path
):
    with pytest.raises(ValueError, match=message) as refused:
        engine_of(tmp_path, name, f"vllm.{given}", tensor=tensor)
    [said] = re.findall(r"set it to (\d+)", str(refused.value))
    assert engine_of(tmp_path, name, f"vllm.{given}", tensor=said).cache > 0


def test_weights_that_no_number_of_gpus_holds_are_refused_with_larger_gpus(tmp_path):
    # A 32nd of it, with one of 8 key-value heads; GPUs of 0.64 GB leave it a twelfth of that.
    told = r"as at most 32 GPUs can split.*\(--gpu\) of more than 1 GB"
    with pytest.raises(ValueError, match=told):
        engine_of(tmp_path, "Llama-3.1-8B", card=replace(CARDS["h100"], memory=500 * 10**6))


def test_an_engine_in_sleep_mode_takes_memory_only_while_it_is_awake(tmp_path):
    folder = write_config(tmp_path, "Llama-3.1-8B")
    shape, share = read_shape(folder), "rollout.vllm.gpu_memory_utilization=0.5"
    plans = []
    for sleeps in ("false", "true"):
        options = [share, "model.dtype=bfloat16", f"rollout.enable_sleep_mode={sleeps}"]
        cfg = tiny_config(folder, ParallelDims(data=8), *options)
        engine = engine_bytes(cfg, shape, CARDS["h100"])
        plans += stages_memory(
            Job(cfg, shape, CARDS["h100"], []), list(stage_states(cfg, shape)), 4, engine
        )
    awake, asleep = plans
    assert awake.engine == engine.total and asleep.engine == engine.outside
    assert asleep.phases == awake.phases | {"push": engine.weights, "generate": 42.5e9}
    assert asleep.worst == "generate"
    assert awake.total - asleep.total == awake.phases["train"]


def test_what_leaves_is_counted_in_no_phase_of_engines(tmp_path):
    folder = write_config(tmp_path, "Llama-3.1-8B")
    shape, options = read_shape(folder), ["model.dtype=bfloat16", "grpo.beta=0.04"]
    options += ["rollout.vllm.gpu_memory_utilization=0.5", "rollout.enable_sleep_mode=true"]
    stages = {}
    for offload in ("none", "optimizer", "all", "[weights]", "[gradients,reference]"):
        cfg = tiny_config(folder, ParallelDims(data=8), *options, f"train.offload={offload}")
        engine, states = engine_bytes(cfg, shape, CARDS["h100"]), list(stage_states(cfg, shape))
        [stages[offload]] = stages_memory(Job(cfg, shape, CARDS["h100"], []), states, 4, engine)
    state, phases = stages["none"].state, ("log-probabilities", "train", "push", "generate")
    moved = state.gradients + state.optimizer
    assert {
        offload: [stage.away[each] for each in phases] for offload, stage in stages.items()
    } == {
        "none": [0, 0, 0, 0],
        "optimizer": [0, 0, moved, moved],
        "all": [0, 0, moved + state.reference, state.total],
        "[weights]": [0, 0, 0, state.weights],
        "[gradients,reference]": [0, 0] + 2 * [state.gradients + state.reference],
    }
    whole, empty = (stages[each].total_in("generate") for each in ("none", "all"))
    assert whole - empty == state.total
    assert stages["none"].worst == "generate" and stages["all"].worst == "train"


def cache_and_weights(model, folder, dims):
    """Bytes that this worker would cache of a token, and those of all its parameters."""
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    layers = [module for module in model.modules() if isinstance(module, MLAAttention)]
    specs = [layer.get_kv_cache_spec(layer._vllm_config) for layer in layers]
    storages = [parameter.untyped_storage() for parameter in model.parameters()]
    return (
        sum(spec.page_size_bytes / spec.block_size for spec in specs),
        sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()),
    )


@pytest.mark.long
def test_an_engine_caches_latents_whole_in_every_worker_and_its_projections_are_views(tmp_path):
    # To attend to latents, vLLM has two parts of the projection that makes keys and values of them
    # as parameters. Being views, they need no memory of their own.
    folder = servable_model(tmp_path, "deepseek_v3")
    [workers] = read_in_workers([(folder, EngineDims(tensor=2))], cache_and_weights, "bfloat16")
    two = "rollout.tensor_parallel_size=2"
    cfg = tiny_config(folder, ParallelDims(), "model.dtype=bfloat16", two)
    engine = engine_bytes(cfg, read_shape(folder), CARDS["h100"])
    assert workers == [(engine.token_bytes, engine.weights)] * 2
    assert engine.token_bytes == 2 * 3 * (512 + 64)


@pytest.mark.parametrize("family", PATCH_SIZES)
def test_stages_that_use_features_and_engines_have_the_vision_tower(tmp_path, family):
    folder = tiny_vision_model(tmp_path, family)
    shape, dims = read_shape(folder), ParallelDims(pipeline=2)
    stored = load_file(folder / "model.safetensors")
    tower = sum(4 * values.numel() for name, values in stored.items() if "visual." in name)
    configs = [
        tiny_config(folder, dims, "rollout.tensor_parallel_size=2", *each)
        for each in (["data.image_column=image"], [])
    ]
    engine, of_text = (engine_bytes(cfg, shape, CARDS["h100"]) for cfg in configs)
    assert (engine.weights, engine.pushed) == (of_text.weights + tower // 2, of_text.pushed)
    with_images, without = (
        stages_memory(Job(cfg, shape, CARDS["h100"], []), list(stage_states(cfg, shape)), 4, None)
        for cfg in configs
    )
    more = [a.buffers - b.buffers for a, b in zip(with_images, without, strict=True)]
    assert more == [tower, tower if family != FAMILY else 0]


@pytest.mark.parametrize("family", PATCH_SIZES)
def test_engines_have_a_tower_that_is_trained_by_a_push(tmp_path, family):
    folder = tiny_vision_model(tmp_path, family)
    frozen, trained = (
        tiny_config(folder, ParallelDims(), "data.image_column=image", f"model.freeze_vision={x}")
        for x in ("true", "false")
    )
    before = engine_bytes(frozen, trained_shape(frozen), CARDS["h100"])
    engine = engine_bytes(trained, trained_shape(trained), CARDS["h100"])
    assert engine.weights == engine.pushed == before.weights
