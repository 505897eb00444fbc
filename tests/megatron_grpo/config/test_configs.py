"""The shipped configs of large runs: each must fit its model, its GPUs and its own numbers.

`test_golden_plans.py` has their plans.
"""

from pathlib import Path

import pytest

from checkpoint_convert import padded_vocab_size, read_shape
from checkpoint_convert.megatron import checkpoint_layout
from helpers.models.published import write_config
from megatron_grpo.batch.schedule import BatchSchedule
from megatron_grpo.config.file import load_config
from megatron_grpo.config.offload import parts_moved
from megatron_grpo.engines.vllm.args import check_engine_arguments
from megatron_grpo.launch.placement import check_engine_size
from megatron_grpo.planning.card import CARDS
from megatron_grpo.planning.instantiate import build_rank, instantiate
from parallel.alignment import Alignment
from parallel.cpu_device import setup_device
from parallel.microbatches import microbatch_capacity
from push_table import push_table

CONFIGS = Path(__file__).parents[3] / "configs"
GPUS_PER_NODE = 8
RUNS = [
    ("grpo_8b", "Llama-3.1-8B"),
    ("grpo_70b", "Llama-3.3-70B"),
    ("grpo_70b", "Qwen2.5-72B"),
    ("grpo_32b_32k", "Qwen3-32B"),
    ("grpo_32b_64k", "DeepSeek-R1-Distill-Qwen-32B"),
    ("grpo_30b_a3b", "Qwen3-30B-A3B"),
    ("grpo_30b_a3b_vl", "Qwen3-VL-30B-A3B"),
    ("grpo_30b_glm_flash", "GLM-4.7-Flash"),
    ("grpo_qwen3_next_80b", "Qwen3-Next-80B-A3B"),
    ("grpo_gpt_oss_120b", "gpt-oss-120b"),
    ("grpo_106b_a12b", "GLM-4.5-Air"),
    ("grpo_235b_a22b", "Qwen3-235B-A22B"),
    ("grpo_235b_a22b", "MiniMax-M2"),
    ("grpo_355b_a32b", "GLM-4.5"),
    ("grpo_397b_a17b", "Qwen3.5-397B-A17B"),
    ("grpo_405b", "Llama-3.1-405B"),
    ("grpo_671b_a37b", "DeepSeek-V3"),
    ("grpo_671b_h100", "DeepSeek-V3"),
    ("grpo_744b_a40b", "GLM-5"),
    ("grpo_744b_a40b", "DeepSeek-V3.2"),
]
ON_ONE_NODE = [
    ("grpo_70b_lora", "Llama-3.3-70B"),
    ("grpo_70b_lora", "Qwen2.5-72B"),
    ("grpo_70b_one_node", "Llama-3.3-70B"),
    ("grpo_70b_one_node", "Qwen2.5-72B"),
]
"""With adapters, or an optimizer on the host, which ranks without memory cannot have."""
ON_H200 = ("grpo_671b_a37b", "grpo_744b_a40b")
"""Configs for H200; the others are for H100."""
OWN_NODES = (
    *("grpo_30b_a3b_vl", "grpo_235b_a22b", "grpo_355b_a32b", "grpo_397b_a17b", "grpo_405b"),
    "grpo_671b_a37b",
)
"""Configs with engines on nodes behind those of the trainer."""
REPRESENTATIVE = ("Llama-3.1-8B", "Llama-3.3-70B", "Qwen3-30B-A3B")
"""One node, several nodes, a mixture: the others differ in size only, and are slow tests."""
FEW_LAYERS = {"num_hidden_layers": 8}
"""Layers are alike: two per stage suffice."""


def card_of(name):
    return CARDS["h200" if name in ON_H200 else "h100"]


of_every_run = pytest.mark.parametrize(("name", "published"), RUNS + ON_ONE_NODE)
of_runs_in_minutes = pytest.mark.parametrize(
    ("name", "published"),
    [pytest.param(*r, marks=() if r[1] in REPRESENTATIVE else pytest.mark.slow) for r in RUNS],
)


def run_config(name, published, folder, *overrides, **differing):
    """The shipped config with a published model's config.json and no weights."""
    model = write_config(folder, published, **differing)
    return load_config(CONFIGS / f"{name}.yaml", [f"model.path={model}", *overrides])


@of_every_run
def test_batches_and_lengths_go_together(name, published, tmp_path):
    cfg = run_config(name, published, tmp_path)
    schedule = BatchSchedule.of(cfg.grpo)
    assert schedule.minibatch_size % cfg.dims.data == 0
    longest = cfg.data.max_prompt_length + cfg.rollout.max_completion_length
    assert longest == cfg.rollout.vllm["max_model_len"]
    assert longest <= read_shape(cfg.model.path).max_position_embeddings
    alignment = Alignment.for_mesh(cfg.dims, cfg.parallel.sequence_parallel)
    microbatch_capacity([longest], cfg.train.max_tokens_per_microbatch, alignment)
    check_engine_arguments(cfg.rollout.vllm)
    # Groups stay in a node, and every node is full.
    dims = cfg.dims
    assert max(dims.tensor, dims.expert * dims.expert_tensor) <= GPUS_PER_NODE
    check_engine_size(cfg.rollout, GPUS_PER_NODE)
    engine_gpus = cfg.rollout.num_engines * cfg.rollout.gpus_per_engine
    if name in OWN_NODES:
        assert engine_gpus % GPUS_PER_NODE == dims.world_size % GPUS_PER_NODE == 0
    elif "gpu_memory_utilization" in cfg.rollout.vllm:  # trainer and engines share GPUs
        assert engine_gpus == dims.world_size
        assert engine_gpus % GPUS_PER_NODE == 0
    else:
        assert engine_gpus + dims.world_size == GPUS_PER_NODE


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "published", "differing"),
    [
        *(pytest.param(*run, {}, id="-".join(run), marks=pytest.mark.slow) for run in RUNS),
        *(
            pytest.param(*run, FEW_LAYERS, id=f"{'-'.join(run)}-few layers")
            for run in RUNS
            if run[1] in REPRESENTATIVE
        ),
    ],
)
def test_weights_can_be_pushed_and_every_rank_is_built_as_planned(
    name, published, differing, tmp_path, elsewhere
):
    cfg = run_config(name, published, tmp_path, **differing)
    assert "sum" in push_table(cfg)
    # All stages would take minutes: `first_rank` builds one, below.
    if name not in (*OWN_NODES, "grpo_671b_h100", "grpo_744b_a40b"):
        assert elsewhere(instantiate, cfg).faults == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "published", "differing"),
    [
        *(pytest.param(*run, {}, id="-".join(run), marks=pytest.mark.slow) for run in ON_ONE_NODE),
        *(
            pytest.param(*run, FEW_LAYERS, id=f"{'-'.join(run)}-few layers")
            for run in ON_ONE_NODE[::2]
        ),
    ],
)
def test_every_rank_on_one_node_is_built_as_planned(
    name, published, differing, tmp_path, elsewhere
):
    on_gpu = "optimizer.optimizer_cpu_offload=false"
    cfg = run_config(name, published, tmp_path, on_gpu, **differing)
    assert elsewhere(instantiate, cfg).faults == []


def first_rank(cfg):
    setup_device(0)
    shape = read_shape(cfg.model.path)
    return build_rank(cfg, shape, 0, checkpoint_layout(shape, padded_vocab_size(shape, cfg.dims)))


@pytest.mark.long
@of_runs_in_minutes
def test_trainer_and_engine_fit_on_a_gpu(name, published, tmp_path, elsewhere):
    cfg = run_config(name, published, tmp_path)
    first = elsewhere(first_rank, cfg)
    trainer = [first.weight_bytes, first.gradient_bytes, first.optimizer_bytes]
    share = cfg.rollout.vllm.get("gpu_memory_utilization", 0) if name not in OWN_NODES else 0
    memory = card_of(name).memory
    engine = share * memory
    together = sum(trainer) + engine
    moved = parts_moved(cfg.train.offload)
    if "weights" in moved:  # the engine has the GPU to itself
        together = sum(trainer)
    elif "optimizer" in moved:  # by turns
        together = max(sum(trainer), first.weight_bytes + engine)
    # The rest is for activations, logits and communication buffers.
    assert together < 0.82 * memory
    # The config's comment states the same figures.
    said = " + ".join(str(round(num_bytes / 1e9)) for num_bytes in trainer)
    text = " ".join((CONFIGS / f"{name}.yaml").read_text().replace("#", "").split())
    assert f"float32 gradients, master weights and moments of a rank: {said} GB" in text
