"""Layouts that the planner suggests, compared with published ones for the same model and GPUs."""

from dataclasses import replace
from pathlib import Path

import pytest

from checkpoint_convert import read_shape
from helpers.models.published import write_config
from megatron_grpo.config.file import load_config
from megatron_grpo.launch.placement import place
from megatron_grpo.planning import suggest as suggestions
from megatron_grpo.planning.card import CARDS
from megatron_grpo.planning.division import divisions
from megatron_grpo.planning.engine_memory import engine_bytes
from megatron_grpo.planning.job_plan import gpu_use, plan_job
from megatron_grpo.planning.suggest import simulated, suggest
from megatron_grpo.planning.workload import Job

CONFIGS = Path(__file__).parents[3] / "configs"
CARD = CARDS["h100"]
ELSEWHERE = ("rollout.num_engines=1", "rollout.vllm={}", "rollout.tensor_parallel_size=1")
ELSEWHERE += ("train.replay=runs/other",)
"""For the 70B config: engines that are not on the GPUs of the trainer."""
SYNCHRONOUS = "rollout.max_staleness=0"
UNSAID = "rollout={max_completion_length: 3072}"
"""Without a number of engines."""
SHARING = UNSAID.replace("}", ", vllm: {gpu_memory_utilization: 0.4}}")


@pytest.fixture
def job(tmp_path):
    """A job by a shipped config."""

    def job(config, model, num_gpus, *overrides, lengths=(4096,), **differing):
        folder = write_config(tmp_path, model, **differing)
        cfg = load_config(CONFIGS / f"grpo_{config}.yaml", [f"model.path={folder}", *overrides])
        return Job(cfg, read_shape(folder), CARD, [*lengths], num_gpus)

    return job


# Model, GPUs and layout of recipes for H100 in bfloat16: of NeMo-RL for GRPO, of Megatron-Bridge
# for pre-training, which sums gradients in bfloat16: 16 GB less for 8B than here.
PUBLISHED = [
    ("Llama-3.1-8B", 8, {"context": 2, "data": 4}),  # Megatron-Bridge
    ("Qwen3-32B", 32, {"tensor": 4, "pipeline": 4, "data": 2}),  # NeMo-RL
    ("Llama-3.3-70B", 64, {"tensor": 4, "pipeline": 4, "data": 4}),  # NeMo-RL
    ("Llama-3.3-70B", 64, {"tensor": 4, "pipeline": 4, "context": 2, "data": 2}),
    ("Llama-3.1-405B", 512, {"tensor": 8, "pipeline": 8, "context": 2, "data": 4}),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "num_gpus", "layout"),
    [pytest.param(*p, marks=pytest.mark.slow if p[1] > 32 else ()) for p in PUBLISHED],
)
def test_suggest_has_published_layouts_and_none_faster_than_its_first(model, num_gpus, layout, job):
    found = suggest(job("70b", model, num_gpus, *ELSEWHERE))
    sizes = {"tensor": 1, "pipeline": 1, "context": 1, "data": 1} | layout
    axes = [f"parallel.{axis}_parallel_size={size}" for axis, size in sizes.items()]
    theirs = job("70b", model, num_gpus, *ELSEWHERE, *axes, "model.megatron={}")
    plan = plan_job(theirs)
    assert plan.fits
    assert theirs.cfg.dims in [each.cfg.dims for each in found]
    assert found[0].time.estimate <= plan.time.estimate
    for each in found:
        assert each.cfg.dims.world_size == num_gpus
        assert each.memory.total <= plan.memory_limit


@pytest.mark.long
def test_overrides_of_a_suggestion_give_the_suggested_plan(job):
    first = suggest(job("70b", "Llama-3.3-70B", 64))[0]
    again = job("70b", "Llama-3.3-70B", 64, *first.as_json()["overrides"])
    plan = plan_job(again)
    assert plan.gpus.is_shared and again.cfg.rollout.num_engines == 8
    assert plan.fits and plan.fullest == first.memory
    assert plan.time == first.time


def test_suggest_keeps_engines_on_gpus_of_their_own(job):
    found = suggest(job("8b", "Llama-3.1-8B", 12, SYNCHRONOUS))
    assert {each.cfg.dims.world_size for each in found} == {8}  # and four engines
    assert all(each.cfg.rollout.num_engines == 4 for each in found)


@pytest.mark.long
@pytest.mark.parametrize(
    ("lengths", "override"),
    [
        ([1100], "rollout.in_flight_updates=true"),
        ([2000, 4096], "rollout.in_flight_updates=false"),
        ([2000, 4096], SHARING),
        ([4096], UNSAID),
    ],
)
def test_suggest_has_the_engines_that_make_a_simulated_step_shortest(override, lengths, job):
    on_8 = job("8b", "Llama-3.1-8B", 8, override, lengths=lengths)
    seconds = {}
    for each in divisions(on_8, engine_bytes(on_8.cfg, on_8.shape, on_8.card)):
        found = suggestions._layouts_on(on_8, each)
        if found:  # seven engines leave one GPU, on which nothing fits
            training = found[0].time.estimate
            sizes = each.cfg.rollout.num_engines, each.num_ranks
            seconds[sizes] = simulated(on_8, each.cfg, training).seconds
    assert len(seconds) > 3
    best = suggest(on_8)[0].cfg
    assert seconds[best.rollout.num_engines, best.dims.world_size] == min(seconds.values())
    assert (best.dims.world_size == 8) is (override == SHARING)


def test_suggest_leaves_no_gpu_idle_where_the_config_has_no_number_of_engines(job):
    first = suggest(job("8b", "Llama-3.1-8B", 16, UNSAID))[0]
    use = gpu_use(first.cfg, CARD, 16)
    assert (use.training, use.generating, use.idle, use.is_shared) == (8, 8, 0, False)


@pytest.mark.long
@pytest.mark.parametrize(("num_gpus", "num_engines"), [(24, 1), (32, 2)])
def test_suggest_has_as_many_engines_over_nodes_as_they_fill(num_gpus, num_engines, job):
    engines = "rollout.num_engines=1", "rollout.tensor_parallel_size=16"
    small = "rollout.vllm.gpu_memory_utilization=0.1", "grpo.generation_batch_size=768"
    first = suggest(job("8b", "Llama-3.1-8B", num_gpus, SYNCHRONOUS, *engines, *small))[0]
    assert (first.cfg.dims.world_size, first.cfg.rollout.num_engines) == (num_gpus, num_engines)
    place(first.cfg, [str(number) for number in range(num_gpus // 8)], 8)


def test_suggest_keeps_experts_in_a_node(job):
    one = job("70b", "Qwen3-30B-A3B", 4, *ELSEWHERE, lengths=(2048,), num_hidden_layers=12)
    found = suggest(replace(one, card=replace(CARD, per_node=2, memory=8 * CARD.memory)))
    assert {each.cfg.dims.expert for each in found} == {1, 2}


def test_suggest_has_each_layout_once_and_recomputes_only_where_it_must(job):
    on_8 = job("70b", "Llama-3.1-8B", 8, *ELSEWHERE)
    found = suggest(on_8)
    layouts = [each.cfg.dims for each in found]
    assert len(layouts) == len(set(layouts))
    assert {each.recomputes for each in found} == {False, True}
    for each in found:
        model = each.cfg.model.model_copy(update={"megatron": {}})
        plain = each.cfg.model_copy(update={"model": model})
        assert plan_job(replace(on_8, cfg=plain)).fits is not each.recomputes


@pytest.mark.parametrize(
    "given",
    [
        ["parallel.sequence_parallel=false", "parallel.overlap_grad_reduce=true"],
        ["parallel.pipeline_parallel_size=2", "parallel.num_layers_in_last_pipeline_stage=10"],
        ["rollout.base_urls=[http://a:8000]", "rollout.num_engines=1"],  # the run starts others
    ],
    ids=" ".join,
)
def test_overrides_of_a_suggestion_have_the_layout_that_was_planned(given, job):
    fields = "model.megatron={bias_activation_fusion: true, window_size: null, first: [1, a b]}"
    found = suggest(job("8b", "Llama-3.1-8B", 12, fields, *given))
    assert {each.cfg.dims.tensor > 1 for each in found} == {False, True}
    for each in found:
        pasted = job("8b", "Llama-3.1-8B", 12, fields, *given, *each.as_json()["overrides"]).cfg
        assert pasted.parallel.model_dump() == each.cfg.parallel.model_dump()
        assert not any("overlap" in word for word in each.overrides)
        assert pasted.num_engines == each.cfg.num_engines
        assert pasted.model.megatron == each.cfg.model.megatron


@pytest.mark.parametrize(
    ("num_gpus", "length", "override", "message"),
    [
        (4, 4096, SYNCHRONOUS, r"take 4 of 4 GPUs.*--gpus 5"),
        (8, 4096, "rollout.tensor_parallel_size=8", r"size 8 leaves none of 8.*--gpus 9"),
        # Mistakes that no layout can mend:
        (8, 9000, "train.seed=1", r"9000 tokens.*max_tokens_per_microbatch = \d+: set it to 9000"),
        (8, 4096, "grpo.num_generations=7", r"generation_batch_size \d+ is not a multiple of"),
    ],
)
def test_suggest_refuses(num_gpus, length, override, message, job):
    with pytest.raises(ValueError, match=message):
        suggest(job("8b", "Llama-3.1-8B", num_gpus, override, lengths=(length,)))
