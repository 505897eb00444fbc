"""Layouts that the planner suggests, compared with published ones for the same model and GPUs."""

from dataclasses import replace
from pathlib import Path

import pytest

from checkpoint_convert import read_shape
from helpers.models.published import write_config
from megatron_grpo.config.config import Config
from megatron_grpo.config.file import load_config
from megatron_grpo.launch.placement import place
from megatron_grpo.planning.card import CARDS
from megatron_grpo.planning.job_plan import plan_job
from megatron_grpo.planning.suggest import simulated, suggest
from megatron_grpo.planning.workload import Job

CONFIGS = Path(__file__).parents[3] / "configs"
CARD = CARDS["h100"]
ENGINES_ELSEWHERE = ("train.replay=runs/other", "rollout.tensor_parallel_size=1")


# Model, GPUs and layout of recipes for H100 in bfloat16: of NeMo-RL for GRPO, of Megatron-Bridge
# for pre-training, which sums gradients in bfloat16: 16 GB less for 8B than here.
PUBLISHED = [
    ("Llama-3.1-8B", 8, {"context": 2, "data": 4}),  # Megatron-Bridge
    ("Qwen3-32B", 32, {"tensor": 4, "pipeline": 4, "data": 2}),  # NeMo-RL
    ("Llama-3.3-70B", 64, {"tensor": 4, "pipeline": 4, "data": 4}),  # NeMo-RL
    ("Llama-3.3-70B", 64, {"tensor": 4, "pipeline": 4, "context": 2, "data": 2}),
    ("Llama-3.1-405B", 512, {"tensor": 8, "pipeline": 8, "context": 2, "data": 4}),
]


def config(folder: Path, *overrides: str) -> Config:
    """The 70B config for a trainer whose engines are not on its GPUs."""
    arguments = [f"model.path={folder}", "rollout.num_engines=1", "rollout.vllm={}"]
    return load_config(CONFIGS / "grpo_70b.yaml", [*arguments, *ENGINES_ELSEWHERE, *overrides])


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "num_gpus", "layout"),
    [pytest.param(*p, marks=pytest.mark.slow if p[1] > 32 else ()) for p in PUBLISHED],
)
def test_every_published_layout_fits_and_none_is_faster_than_the_suggestion(
    model, num_gpus, layout, tmp_path
):
    folder = write_config(tmp_path, model)
    shape = read_shape(folder)
    found = suggest(Job(config(folder), shape, CARD, [4096], num_gpus))
    sizes = {"tensor": 1, "pipeline": 1, "context": 1, "data": 1} | layout
    axes = [f"parallel.{axis}_parallel_size={size}" for axis, size in sizes.items()]
    theirs = config(folder, *axes, "model.megatron={}")
    plan = plan_job(Job(theirs, shape, CARD, [4096], num_gpus))
    assert plan.fits
    assert theirs.dims in [each.cfg.dims for each in found]
    assert found[0].time.estimate <= plan.time.estimate
    for each in found:
        assert each.cfg.dims.world_size == num_gpus
        assert each.memory.total <= plan.memory_limit


@pytest.mark.long
def test_a_suggestion_can_be_written_behind_the_config_and_plans_as_it_says(tmp_path):
    folder = write_config(tmp_path, "Llama-3.3-70B")
    shape, path = read_shape(folder), CONFIGS / "grpo_70b.yaml"
    cfg = load_config(path, [f"model.path={folder}"])
    first = suggest(Job(cfg, shape, CARD, [4096], 64))[0]
    again = load_config(path, [f"model.path={folder}", *first.as_json()["overrides"]])
    plan = plan_job(Job(again, shape, CARD, [4096], 64))
    assert plan.is_shared and again.rollout.num_engines == 8
    assert plan.fits and plan.fullest == first.memory
    assert plan.time == first.time


SYNCHRONOUS = "rollout.max_staleness=0"


def test_engines_on_gpus_of_their_own_keep_them(tmp_path):
    folder = write_config(tmp_path, "Llama-3.1-8B")
    cfg = load_config(CONFIGS / "grpo_8b.yaml", [f"model.path={folder}", SYNCHRONOUS])
    found = suggest(Job(cfg, read_shape(folder), CARD, [4096], 12))
    assert {each.cfg.dims.world_size for each in found} == {8}  # and four engines
    assert all(each.cfg.rollout.num_engines == 4 for each in found)
    with pytest.raises(ValueError, match=r"take 4 of 4 GPUs.*--gpus 5"):
        suggest(Job(cfg, read_shape(folder), CARD, [4096], 4))


SHORT, LONG = [1100], [2000, 4096]


@pytest.mark.long
@pytest.mark.parametrize(
    ("lengths", "in_flight"),
    [
        pytest.param(SHORT, False, marks=pytest.mark.slow),
        (SHORT, True),
        (LONG, False),
        pytest.param(LONG, True, marks=pytest.mark.slow),
    ],
)
def test_beside_training_there_are_as_many_engines_as_make_a_simulated_step_shortest(
    in_flight, lengths, tmp_path
):
    folder = write_config(tmp_path, "Llama-3.1-8B")
    ahead = f"rollout.in_flight_updates={str(in_flight).lower()}"
    cfg = load_config(CONFIGS / "grpo_8b.yaml", [f"model.path={folder}", ahead])
    shape = read_shape(folder)
    first = suggest(Job(cfg, shape, CARD, lengths, 8))[0]
    seconds = {}
    for number in range(1, 8):
        waiting = {"max_staleness": 0, "in_flight_updates": False}
        rollout = cfg.rollout.model_copy(update={"num_engines": number, **waiting})
        others = suggest(Job(cfg.model_copy(update={"rollout": rollout}), shape, CARD, lengths, 8))
        if others:  # seven engines leave one GPU, on which nothing fits
            each = replace(others[0], cfg=_as_in(cfg, others[0].cfg))
            seconds[number] = simulated(each, Job(cfg, shape, CARD, lengths, 8)).seconds
    assert len(seconds) > 3
    assert seconds[first.cfg.rollout.num_engines] == min(seconds.values())


def _as_in(cfg: Config, other: Config) -> Config:
    """`other`, as asynchronous as `cfg`."""
    update = {name: getattr(cfg.rollout, name) for name in ("max_staleness", "in_flight_updates")}
    return other.model_copy(update={"rollout": other.rollout.model_copy(update=update)})


def test_an_engine_that_leaves_no_gpu_to_the_trainer_is_refused(tmp_path):
    folder = write_config(tmp_path, "Llama-3.1-8B")
    overrides = [f"model.path={folder}", "rollout.tensor_parallel_size=8"]
    cfg = load_config(CONFIGS / "grpo_8b.yaml", overrides)
    with pytest.raises(ValueError, match=r"tensor_parallel_size 8 leaves none of 8.*--gpus 9"):
        suggest(Job(cfg, read_shape(folder), CARD, [4096], 8))


@pytest.mark.long
@pytest.mark.parametrize(("num_gpus", "num_engines"), [(24, 1), (32, 2)])
def test_engines_over_several_nodes_that_share_gpus_take_as_many_as_they_fill(
    num_gpus, num_engines, tmp_path
):
    folder = write_config(tmp_path, "Llama-3.1-8B")
    overrides = [
        f"model.path={folder}",
        SYNCHRONOUS,
        "rollout.num_engines=1",
        "rollout.tensor_parallel_size=16",
        "rollout.vllm.gpu_memory_utilization=0.1",
        "grpo.generation_batch_size=768",  # quickly packed for every layout
    ]
    cfg = load_config(CONFIGS / "grpo_8b.yaml", overrides)
    first = suggest(Job(cfg, read_shape(folder), CARD, [4096], num_gpus))[0]
    assert (first.cfg.dims.world_size, first.cfg.rollout.num_engines) == (num_gpus, num_engines)
    place(first.cfg, [str(number) for number in range(num_gpus // 8)], 8)


def test_experts_stay_in_a_node(tmp_path):
    folder = write_config(tmp_path, "Qwen3-30B-A3B", num_hidden_layers=12)
    card = replace(CARD, per_node=2, memory=8 * CARD.memory)
    found = suggest(Job(config(folder), read_shape(folder), card, [2048], 4))
    assert {each.cfg.dims.expert for each in found} == {1, 2}


def test_each_layout_is_suggested_once_and_recomputes_only_where_it_must(tmp_path):
    folder = write_config(tmp_path, "Llama-3.1-8B")
    cfg, shape = config(folder), read_shape(folder)
    found = suggest(Job(cfg, shape, CARD, [4096], 8))
    layouts = [each.cfg.dims for each in found]
    assert len(layouts) == len(set(layouts))
    assert {each.recomputes for each in found} == {False, True}
    for each in found:
        model = each.cfg.model.model_copy(update={"megatron": {}})
        plain = each.cfg.model_copy(update={"model": model})
        assert plan_job(Job(plain, shape, CARD, [4096], 8)).fits is not each.recomputes


@pytest.mark.parametrize(
    "given",
    [
        ["parallel.sequence_parallel=false"],
        ["parallel.pipeline_parallel_size=2", "parallel.num_layers_in_last_pipeline_stage=10"],
        ["rollout.base_urls=[http://a:8000]", "rollout.num_engines=1"],  # the run starts others
    ],
    ids=" ".join,
)
def test_pasted_words_have_the_layout_that_was_planned(given, tmp_path):
    folder, path = write_config(tmp_path, "Llama-3.1-8B"), CONFIGS / "grpo_8b.yaml"
    settings = "model.megatron={bias_activation_fusion: true, window_size: null, first: [1, a b]}"
    overrides = [f"model.path={folder}", settings, *given]
    found = suggest(Job(load_config(path, overrides), read_shape(folder), CARD, [4096], 12))
    assert {each.cfg.dims.tensor > 1 for each in found} == {False, True}
    for each in found:
        pasted = load_config(path, [*overrides, *each.as_json()["overrides"]])
        assert pasted.parallel.sequence_parallel is each.cfg.parallel.sequence_parallel
        assert pasted.dims == each.cfg.dims
        assert pasted.model.megatron == each.cfg.model.megatron


@pytest.mark.parametrize(
    ("length", "override", "message"),
    [
        (9000, "train.seed=1", r"9000 tokens.*max_tokens_per_microbatch = \d+: set it to 9000"),
        (4096, "grpo.num_generations=7", r"generation_batch_size \d+ is not a multiple of"),
    ],
)
def test_what_no_layout_can_mend_is_said_as_it_is(length, override, message, tmp_path):
    folder = write_config(tmp_path, "Llama-3.1-8B")
    cfg = load_config(CONFIGS / "grpo_8b.yaml", [f"model.path={folder}", override])
    with pytest.raises(ValueError, match=message):
        suggest(Job(cfg, read_shape(folder), CARD, [length], 8))
