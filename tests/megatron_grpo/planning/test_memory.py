"""The planner's worst phase compared with the memory of real ranks, and what engines leave."""

import ctypes
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.torch import load_file

from checkpoint_convert import read_shape
from helpers.models.images import FAMILY, PATCH_SIZES, tiny_vision_model
from helpers.models.published import write_config
from helpers.oracle.policies import Lengths, accumulate, pack_all, tiny_config
from helpers.ranks.processes import run_ranks
from megatron_grpo.config.config import Config
from megatron_grpo.planning.card import CARDS
from megatron_grpo.planning.engine_memory import engine_bytes
from megatron_grpo.planning.memory import stages_memory
from megatron_grpo.planning.state import stage_states
from megatron_grpo.planning.workload import Job
from megatron_grpo.policy.lora import add_adapters
from megatron_grpo.policy.model import add_gradients, add_optimizer, build_model
from parallel import ParallelDims
from parallel.cpu_device import setup_device
from parallel.groups import init_groups

M_MMAP_THRESHOLD = -3
LENGTHS = [[(64, 192), (32, 96), (32, 96)]] * 3


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
    """Memory that this rank's process takes to train on its microbatches."""
    # Each tensor gets its own mapping, so that freed memory leaves the resident size at once.
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
    # The first microbatch touches the gradients' memory, whatever its length.
    accumulate(policy, groups, pack_all([[(4, 4)]], cfg.dims))
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = resident("VmRSS")
    accumulate(policy, groups, batches)
    return Taken(before - empty, resident("VmHWM") - before)


def planned_and_measured(
    folder: Path, dims: ParallelDims, *overrides: str
) -> tuple[list[Taken], list[Taken]]:
    """(planned, measured) by rank, one rank per stage."""
    cfg = tiny_config(
        folder,
        dims,
        f"train.max_tokens_per_microbatch={sum(map(sum, LENGTHS[0]))}",
        "model.megatron.transformer_impl=local",
        "grpo.beta=0",
        *overrides,
    )
    shape = read_shape(cfg.model.path)
    states = list(stage_states(cfg, shape))
    stages = stages_memory(
        Job(cfg, shape, CARDS["h100"], []), states, len(LENGTHS), None, device="cpu"
    )
    planned = [Taken(stage.state.total, stage.phases["train"]) for stage in stages]
    return planned, run_ranks(dims.world_size, measure, cfg, LENGTHS)


@pytest.mark.slow
def test_stages_memory_has_the_activations_that_a_process_takes(tmp_path):
    # A third of its layers, with the head and the widths of all.
    folder = write_config(tmp_path, "SmolLM2-135M", num_hidden_layers=10)
    for planned, measured in zip(
        *planned_and_measured(folder, ParallelDims(pipeline=2)), strict=True
    ):
        assert measured.activations == pytest.approx(planned.activations, rel=0.05)


@pytest.mark.slow
def test_stages_memory_of_adapters_is_as_much_less_as_is_measured(tmp_path):
    """The process's other memory, some 50 MB, is the same in both."""
    folder, dims = write_config(tmp_path, "SmolLM2-135M", num_hidden_layers=10), ParallelDims()
    planned, measured = planned_and_measured(folder, dims)
    for_adapters, of_adapters = planned_and_measured(folder, dims, "lora.r=16")
    for has, expected in zip(of_adapters, for_adapters, strict=True):
        assert has.activations == pytest.approx(expected.activations, rel=0.05)
    less, expected = (
        full[0].state - adapters[0].state
        for full, adapters in ((measured, of_adapters), (planned, for_adapters))
    )
    assert less == pytest.approx(expected, rel=0.05)
    assert of_adapters[0].state < 0.35 * measured[0].state


@pytest.fixture
def stage_of(job_of):
    """The only stage of Llama-3.1-8B on 8 ranks, next to an engine with half of the memory."""

    def stage_of(*overrides):
        half = "rollout.vllm.gpu_memory_utilization=0.5"
        job = job_of("Llama-3.1-8B", half, *overrides, dims=ParallelDims(data=8))
        engine = engine_bytes(job.cfg, job.shape, job.card)
        [stage] = stages_memory(job, list(stage_states(job.cfg, job.shape)), 4, engine)
        return stage, engine

    return stage_of


def test_stages_memory_has_an_engine_in_sleep_mode_while_it_is_awake(stage_of):
    (awake, engine), (asleep, _) = (
        stage_of(f"rollout.enable_sleep_mode={sleeps}") for sleeps in ("false", "true")
    )
    assert awake.engine == engine.total and asleep.engine == engine.outside
    assert asleep.phases == awake.phases | {"push": engine.weights, "generate": 42.5e9}
    assert asleep.worst == "generate"
    assert awake.total - asleep.total == awake.phases["train"]


def test_stages_memory_counts_what_leaves_in_no_phase_of_engines(stage_of):
    asleep = "rollout.enable_sleep_mode=true", "grpo.beta=0.04"
    parts = ("none", "optimizer", "all", "[weights]", "[gradients,reference]")
    stages = {part: stage_of(*asleep, f"train.offload={part}")[0] for part in parts}
    state, phases = stages["none"].state, ("log-probabilities", "train", "push", "generate")
    moved = state.gradients + state.optimizer
    assert {part: [stage.away[each] for each in phases] for part, stage in stages.items()} == {
        "none": [0, 0, 0, 0],
        "optimizer": [0, 0, moved, moved],
        "all": [0, 0, moved + state.reference, state.total],
        "[weights]": [0, 0, 0, state.weights],
        "[gradients,reference]": [0, 0] + 2 * [state.gradients + state.reference],
    }
    whole, empty = (stages[each].total_in("generate") for each in ("none", "all"))
    assert whole - empty == state.total
    assert stages["none"].worst == "generate" and stages["all"].worst == "train"


@pytest.mark.parametrize("family", PATCH_SIZES)
def test_stages_memory_has_the_tower_where_features_are_used(tmp_path, family):
    folder = tiny_vision_model(tmp_path, family)
    shape, dims = read_shape(folder), ParallelDims(pipeline=2)
    stored = load_file(folder / "model.safetensors")
    tower = sum(4 * values.numel() for name, values in stored.items() if "visual." in name)
    configs = [tiny_config(folder, dims, *x) for x in (["data.image_column=image"], [])]
    with_images, without = (
        stages_memory(Job(cfg, shape, CARDS["h100"], []), list(stage_states(cfg, shape)), 4, None)
        for cfg in configs
    )
    more = [a.buffers - b.buffers for a, b in zip(with_images, without, strict=True)]
    assert more == [tower, tower if family != FAMILY else 0]
