"""A push of adapters writes every bit where vLLM would load an adapter saved by PEFT."""

from math import prod
from typing import Any

import pytest

from checkpoint_convert import read_shape
from checkpoint_convert.vllm import EngineDims, check_engine
from helpers.engines.vllm_workers import WorkerClient
from helpers.models.conversions import weights_of, with_weights
from helpers.models.tiny import servable_model
from helpers.models.towers import tiny_multimodal
from helpers.oracle.policies import layout_name
from helpers.pushes.adapters import (
    PUSHES,
    Case,
    config_of,
    described,
    failing_push,
    push_adapters,
)
from helpers.ranks.processes import run_ranks
from megatron_grpo.config.lora import LoraConfig
from megatron_grpo.engine_weights.layouts import worker_shards
from megatron_grpo.policy.lora_targets import peft_tensors
from parallel import ParallelDims

R3 = ("lora.r=3", "lora.lora_alpha=5")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def targets_override(lora: LoraConfig) -> str:
    return f"lora.target_modules=[{','.join(lora.target_modules)}]"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return servable_model(tmp_path_factory.mktemp("model") / "base", "qwen3")


@pytest.mark.long
@pytest.mark.parametrize(
    "dims",
    [
        ParallelDims(tensor=2, pipeline=2),
        pytest.param(ParallelDims(), marks=pytest.mark.slow),
        pytest.param(ParallelDims(data=2, context=2), marks=pytest.mark.slow),
        pytest.param(ParallelDims(tensor=4), marks=pytest.mark.slow),  # more than key-value heads
    ],
    ids=layout_name,
)
def test_each_of_five_pushes_leaves_what_vllm_loads_from_the_folder(tmp_path, engines, base, dims):
    size, workers = engines
    case = Case(base, EngineDims(tensor=size), R3)
    ranks = run_ranks(dims.world_size, push_adapters, dims, case, workers, tmp_path, timeout=600)
    tensors = peft_tensors(LoraConfig(r=3), read_shape(base))
    # Workers share split tensors, and each has all others.
    least = 2 * sum(map(prod, tensors.values()))
    assert len(ranks[0]) == PUSHES
    for number, held in enumerate(ranks[0], 1):
        for workers_held in held:
            received = [worker.bytes_received for worker in workers_held]
            assert number * least <= sum(received) <= number * size * least
            for worker in workers_held:
                assert not worker.differing
                assert worker.filled == len(tensors)
    if size == 1:
        assert received == [PUSHES * least]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dims", "further"),
    [
        ("qwen3_moe", ParallelDims(tensor=2), ()),
        # vLLM has buffers for the gate, and for the MLP of the first, dense layer, too.
        ("glm4_moe", ParallelDims(tensor=2), ("shared_experts.up_proj",)),
        ("glm4_moe", ParallelDims(pipeline=2), ("shared_experts.down_proj", "mlp.down_proj")),
        ("gpt_oss", ParallelDims(data=2, expert=2), ()),
        ("minimax_m2", ParallelDims(), ()),
    ],
    ids=lambda each: layout_name(each) if isinstance(each, ParallelDims) else str(each),
)
def test_pushes_of_adapters_beside_experts_leave_what_vllm_loads(
    tmp_path, engines, family, dims, further
):
    (size, workers), stored = engines, servable_model(tmp_path / "stored", family)
    # vLLM would not round routers in float32.
    rounded = {name: value.bfloat16() for name, value in weights_of(stored).items()}
    base = with_weights(stored, tmp_path / "base", rounded)
    lora = LoraConfig(r=3, target_modules=ATTENTION + further)
    case = Case(base, EngineDims(tensor=size), (*R3, targets_override(lora)))
    [held, *_] = run_ranks(dims.world_size, push_adapters, dims, case, workers, tmp_path)
    for worker in (worker for workers_held in held[-1] for worker in workers_held):
        assert not worker.differing
        assert worker.filled == len(peft_tensors(lora, read_shape(base)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gemma3", "mistral3", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_pushes_of_adapters_on_a_text_tower_leave_what_vllm_loads(tmp_path, engines, kind):
    base, (size, workers) = tiny_multimodal(tmp_path / "model", kind), engines
    mlp = () if "moe" in kind else ("gate_proj", "up_proj", "down_proj")
    lora = LoraConfig(r=3, target_modules=ATTENTION + mlp)
    case = Case(base, EngineDims(tensor=size), (*R3, targets_override(lora)))
    [held] = run_ranks(1, push_adapters, ParallelDims(), case, workers, tmp_path, timeout=600)
    for worker in (worker for workers_held in held[-1] for worker in workers_held):
        assert not worker.differing
        assert worker.filled == len(peft_tensors(lora, read_shape(base)))


@pytest.mark.parametrize(
    ("fault", "name"),
    [("base", "model.layers.1.mlp.down_proj.weight"), ("sent", ".lora_")],
)
def test_a_flipped_bit_of_base_or_adapter_ends_a_push_with_the_name(engines, base, fault, name):
    size, workers = engines
    case = Case(base, EngineDims(tensor=size), R3)
    [message] = run_ranks(1, failing_push, ParallelDims(), case, workers, fault, timeout=300)
    assert "differ from what was pushed: model.layers." in message
    assert name in message


def test_an_engine_without_a_module_or_of_another_rank_is_refused_by_name(engines, base):
    size, workers = engines
    case = Case(base, EngineDims(tensor=size), R3)
    cfg = config_of(case, ParallelDims(), WorkerClient(workers))
    held = worker_shards(cfg, read_shape(base))

    def error_of(**arguments: Any) -> str:
        [*_, reports] = workers.call(described, case, cfg, arguments)
        with pytest.raises(ValueError, match="do not match the model") as caught:
            check_engine(held.all, reports, held.dtypes)
        return str(caught.value)

    unbound = error_of(lora_target_modules=["qkv_proj", "gate_up_proj", "down_proj"])
    assert "model.layers.0.self_attn.o_proj.lora_A.0 [8, " in unbound
    assert "is missing" in unbound and "qkv_proj" not in unbound
    assert "down_proj.lora_A.0 has shape [16, " in error_of(max_lora_rank=16)


@pytest.mark.long
def test_modules_that_vllm_fuses_may_have_adapters_in_part(tmp_path, engines, base):
    size, workers = engines
    chosen = (
        "lora.target_modules=[q_proj,v_proj,mlp.up_proj]",
        "lora.exclude_modules=[1.mlp.up_proj]",
    )
    case = Case(base, EngineDims(tensor=size), ("lora.r=8", "lora.use_rslora=true", *chosen))
    [held] = run_ranks(1, push_adapters, ParallelDims(), case, workers, tmp_path, timeout=600)
    for worker in (worker for workers_held in held[-1] for worker in workers_held):
        assert not worker.differing
        assert worker.filled == 2 * (2 + 2 + 1)
