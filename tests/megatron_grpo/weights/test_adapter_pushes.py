"""A push of adapters puts every bit where vLLM itself would put an adapter that PEFT has saved."""

from math import prod

import pytest

from checkpoint_convert import read_shape
from checkpoint_convert.vllm import EngineDims
from helpers.adapter_pushes import PUSHES, Case, push_adapters
from helpers.models import servable_model
from helpers.policies import layout_name
from helpers.ranks import run_ranks
from helpers.vllm_workers import worker_engines
from megatron_grpo.config.lora import LoraConfig
from megatron_grpo.policy.lora_targets import peft_tensors
from parallel import ParallelDims

NUM_ENGINES = 2
R3 = ("lora.r=3", "lora.lora_alpha=5")


@pytest.fixture(scope="module", params=[1, 2], ids="TP{}".format)
def engines(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sockets")
    with worker_engines(NUM_ENGINES, request.param, folder, timeout=900) as engines:
        yield request.param, engines


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return servable_model(tmp_path_factory.mktemp("model") / "base", "qwen3")


@pytest.mark.parametrize(
    "dims",
    [ParallelDims(), ParallelDims(tensor=2, pipeline=2), ParallelDims(data=2, context=2)],
    ids=layout_name,
)
def test_each_of_five_pushes_leaves_what_vllm_loads_from_the_folder(tmp_path, engines, base, dims):
    size, workers = engines
    case = Case(base, EngineDims(tensor=size), R3)
    ranks = run_ranks(dims.world_size, push_adapters, dims, case, workers, tmp_path, timeout=600)
    tensors = peft_tensors(LoraConfig(r=3), read_shape(base))
    # Workers share what is split, and each has all of what is not.
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
