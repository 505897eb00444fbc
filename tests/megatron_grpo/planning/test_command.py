"""`megatron-grpo plan`, as people and scripts use it."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

from checkpoint_convert import read_shape
from helpers.models.published import write_config
from megatron_grpo.cli import app
from megatron_grpo.config.file import load_config
from megatron_grpo.planning.card import CARDS
from megatron_grpo.planning.command import job_table, print_plan, print_suggestions
from megatron_grpo.planning.job_plan import gpu_use, min_gpus, plan_job
from megatron_grpo.planning.memory import EngineBytes
from megatron_grpo.planning.suggest import suggest
from megatron_grpo.planning.workload import Job

CONFIGS, CARD = Path(__file__).parents[3] / "configs", CARDS["h100"]
DEFAULTS = {"gpu": "h100", "num_gpus": None, "lengths_file": None, "as_json": False}
SMALL_BATCH = "grpo.generation_batch_size=512"
"""Packing it for every layout takes a third of the time."""
NEMO_RL = ("parallel.tensor_parallel_size=4", "parallel.data_parallel_size=4")
"""NeMo-RL's layout for 70B: too much next to an engine that keeps its memory."""
OFFLOADS = (*NEMO_RL, "rollout.enable_sleep_mode=true", "rollout.vllm.gpu_memory_utilization=0.8")
ROOM = "train.max_tokens_per_microbatch=16384"
SHARED, UNKNOWN = "grpo.shared_prompts=true", "data.max_prompt_length=null"


@pytest.fixture
def cfg(tmp_path):
    """The shipped config of the 70B run."""
    folder = write_config(tmp_path, "Llama-3.3-70B")

    def load(*overrides):
        return load_config(CONFIGS / "grpo_70b.yaml", [f"model.path={folder}", *overrides])

    return load


@pytest.fixture
def printed(cfg, capsys):
    """Output of `plan` for the 70B run."""

    def printed(*overrides, show=print_plan, **options):
        show(cfg(*overrides), **DEFAULTS | options)
        return capsys.readouterr().out

    return printed


@pytest.fixture
def figures(printed):
    def figures(*overrides, **options) -> Any:
        return json.loads(printed(*overrides, as_json=True, **options))

    return figures


def shaped_job(cfg, *more) -> Job:
    return Job(cfg, read_shape(cfg.model.path), CARD, [4096], *more)


def test_print_plan_has_memory_work_and_links(printed):
    lines = printed().splitlines()
    assert lines[:3] == [
        "llama in bfloat16 on 64 h100",
        "trainer: tp(8) * pp(4) * cp(1) * dp(2)",
        "engines: 8 x 8 GPUs, shared with the trainer",
    ]
    first = next(line for line in lines if line.startswith("    0 "))
    assert first.split()[:5] == ["0", "4.542", "9.083", "13.625", "0.000"]
    assert any(line.endswith("GB free") for line in lines)
    step = [line.split(maxsplit=1) for line in lines[lines.index("optimizer step") + 1 :][:4]]
    assert [number for number, _ in step] == ["512", "2,097,152", "0", "256"]
    assert max(map(len, lines)) <= 100
    purposes = [line.partition("  ")[0] for line in lines if line.endswith(" s")]
    assert purposes[-4:] == ["tensor", "pipeline", "data", "push, 1 step of 4"]


def test_print_plan_has_a_push_of_every_step_only_where_every_step_generates(printed):
    every = "grpo.steps_per_generation=1"
    assert "\npush, 1 step of 2  " in printed(every, "grpo.num_iterations=2")
    assert "\npush     " in printed(every)


def test_print_plan_has_asynchrony_only_of_engines_on_gpus_of_their_own(printed, figures):
    def rows(*overrides: str, **options: Any) -> list[list[str]]:
        lines = printed(*overrides, **options).splitlines()
        heads = [number for number, line in enumerate(lines) if line.startswith("rollout.max_st")]
        return [line.split() for head in heads for line in lines[head + 1 : head + 7]]

    assert rows() == []
    apart = "parallel.data_parallel_size=1", "rollout.num_engines=4"
    found = rows(*apart, num_gpus=64)
    assert [row[0].strip(",") for row in found] == ["0", "1", "1", "2", "4", "8"]
    assert [row[1] for row in found if "*" in row] == ["*"] and "*" in found[0]
    more = "rollout.max_staleness=3", "rollout.in_flight_updates=true"
    found = rows(*apart, *more, num_gpus=64)
    assert [row[:4] for row in found if "*" in row] == [["3,", "in", "flight", "*"]]

    plan = figures(*apart, num_gpus=64)
    synchronous, ahead = plan["asynchrony"][:2]
    updates = 4 * plan["step"]["estimate_seconds"]
    assert synchronous["trainer_busy"] * synchronous["seconds"] == pytest.approx(updates)
    # Equal lengths: the simulation has the bound's time, and that of a prompt.
    generate = synchronous["seconds"] - updates - plan["push"]["seconds"]
    assert generate == pytest.approx(plan["rollout"]["seconds"], rel=0.1)
    assert ahead["seconds"] < synchronous["seconds"]


def test_plan_counts_the_computed_tokens_of_shared_prompts(figures):
    off, on = figures(ROOM), figures(ROOM, SHARED)
    assert off["fits"] and off["is_shared"] and off["num_gpus"] == 64
    assert off["push"]["seconds"] == pytest.approx(0.353, abs=0.001)
    assert off["workload"]["computed_tokens"] == 512 * 4096
    # Five completions of 3,072 fit with one prompt, then the last three of a group of eight.
    assert on["workload"]["computed_tokens"] == 64 * (2 * 1023 + 8 * 3073)
    assert on["step"]["flops"] < off["step"]["flops"] / 1.2
    (sent, sent_unshared) = (each["step"]["links"][0]["num_bytes"] for each in (on, off))
    filled = on["workload"]["computed_tokens"] + on["workload"]["padding"]
    assert sent == pytest.approx(sent_unshared * filled / (512 * 4096))


def test_plan_says_that_prompts_of_unknown_length_are_not_counted(printed, figures):
    unknown = printed(UNKNOWN)
    assert "not counted: " not in printed(SHARED) + unknown
    assert (
        "\ngeneration, and step with engines: unknown without data.max_prompt_length\n" in unknown
    )
    assert "\nnot counted: grpo.shared_prompts\n" in printed(SHARED, UNKNOWN)
    found = [figures(UNKNOWN, *each) for each in ((), (SHARED,))]
    assert [each.pop("not_counted") for each in found] == [[], ["grpo.shared_prompts"]]
    assert found[0] == found[1]


@pytest.fixture
def plan(tmp_path, capsys):
    """Output of `plan` for a shipped config and a published model."""

    def plan(config: str, model: str, *arguments: str, **differing: Any) -> str:
        folder = write_config(tmp_path / model, model, **differing)
        path = CONFIGS / f"grpo_{config}.yaml"
        app(["plan", str(path), f"model.path={folder}", *arguments], standalone_mode=False)
        return capsys.readouterr().out

    return plan


@pytest.mark.parametrize(
    ("config", "model", "gpus", "overrides", "differing"),
    [
        ("8b", "Llama-3.1-8B", "16 h100", [], {}),
        ("32b_32k", "Qwen3-32B", "32 h100", [], {}),
        ("70b", "Llama-3.3-70B", "64 b200", [SMALL_BATCH], {}),
        ("235b_a22b", "Qwen3-235B-A22B", "24 h100", [SMALL_BATCH], {"num_hidden_layers": 20}),
        ("671b_a37b", "DeepSeek-V3", "32 h200", [SMALL_BATCH], {"num_hidden_layers": 8}),
    ],
)
def test_overrides_that_suggest_prints_can_be_pasted(
    plan, config, model, gpus, overrides, differing
):
    number, gpu = gpus.split()
    options = *overrides, "--gpus", number, "--gpu", gpu
    suggested = plan(config, model, *options, "--suggest", **differing)
    _, used, _, head, first, *_ = suggested.splitlines()
    pasted = suggested.partition("config's name:\n")[2].replace("\\\n", " ")
    accepted = plan(config, model, *options, *shlex.split(pasted), **differing)
    sizes = dict(zip(head.split(), first.split(), strict=False))
    trainer = " * ".join(f"{axis}({sizes[axis]})" for axis in ("tp", "pp", "cp", "dp"))
    assert f"\ntrainer: {trainer}\n" in accepted
    assert f"\n{used}\n" in accepted and used.endswith(", none idle")
    assert f" {first.split('  ')[-1].strip()}  step with engines, simulated\n" in accepted
    is_dense = config in ("8b", "32b_32k", "70b")
    assert is_dense is ("expert" not in suggested)


def test_suggestions_say_why_gpus_stay_idle_and_that_a_config_is_the_fastest(plan):
    model = "8b", "Llama-3.1-8B", SMALL_BATCH, "--suggest", "--gpus"
    fixed = plan(*model, "32", "rollout.max_staleness=0")
    assert "GPUs: 24 train, 4 generate, 4 idle\nhint: for the idle: leave out rollout.num" in fixed
    assert plan(*model, "8").endswith("hint: the config has the first layout\n\n")


@pytest.fixture
def compared(tmp_path, capsys):
    """Output of `plan --with` for the 70B run."""
    folder = write_config(tmp_path, "Llama-3.3-70B")

    def run(*changes: str, options: tuple[str, ...] = ()) -> str:
        words = [word for change in changes for word in ("--with", change)]
        given = [str(CONFIGS / "grpo_70b.yaml"), f"model.path={folder}", SMALL_BATCH]
        app(["plan", *given, *words, *options], standalone_mode=False)
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize(
    ("changes", "differ"),
    [
        (
            "model.megatron.fp8=e4m3 model.megatron.fp8_recipe=blockwise",
            {"temporary", "sum in phase train", "step, least time", "step, estimate"},
        ),
        (
            f"{SHARED} {ROOM}",
            {"microbatches per model copy", "tokens per step", "step, estimate"},
        ),
        ("parallel.overlap_grad_reduce=true", {"step, estimate", "exposed traffic"}),
        (
            "rollout.quantization=int8",
            {"push, least time", "generation, least time", "cached tokens per engine"},
        ),
        (
            "rollout.enable_sleep_mode=true train.offload=all",
            {"sum in phase generate", "host memory per node"},
        ),
        ("parallel.data_parallel_size=4", {"GPUs", "microbatches per model copy"}),
        ("parallel.tensor_parallel_size=4", {"fits", "weights", "sum in phase train"}),
    ],
)
def test_plan_with_marks_figures_that_differ(compared, changes, differ):
    _, title, _, _, head, *rows = compared(*changes.split()).splitlines()
    assert title == f"with {changes}"
    assert head.split() == ["as", "it", "is", "with"]
    cells = [re.split(r"  +", row.strip()) for row in rows]
    marked = {label for label, *_, star in cells if star == "*"}
    assert differ <= marked
    assert all((one == other) is (label not in marked) for label, one, other, *_ in cells)


def test_plan_with_prints_both_plans_as_json(figures, compared):
    change = "train.max_tokens_per_microbatch=8192"
    found = json.loads(compared(change, options=("--json", "--gpus", "128")))
    assert found == {
        "config": figures(SMALL_BATCH, num_gpus=128),
        "with": figures(SMALL_BATCH, change, num_gpus=128),
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("train.offload=al", "'al': it is none, optimizer, all, or a list"),
        ("train.offload=all", "makes room for engines"),
        ("parallel.tensor_parallel_size=3", r"num_attention_heads\(64\)"),
        ("rollout.vllm.gpu_memory_utilization=0.1", "leaves nothing for keys and values"),
        ("model.path=nowhere", "nowhere"),
        ("parallel", "parallel"),
    ],
)
def test_plan_with_names_a_refused_override(compared, change, message):
    with pytest.raises(ValueError, match=f"^--with {change}: .*{message}"):
        compared(change)


def test_plan_names_cards_that_need_another_package_for_packed_attention(printed):
    local = "model.megatron.transformer_impl=local"
    for card, override, is_named in (
        ("a100", [], True),
        ("a100", [local], False),
        ("a100", [SHARED], False),
        ("h100", [], False),
    ):
        found = printed(SMALL_BATCH, *override, gpu=card)
        assert ("Transformer Engine needs flash-attn\n" in found) == is_named, (card, override)
        assert (f"flash-attn: {local}\n" in found) == is_named


def test_plan_refuses_what_does_not_fit_with_a_layout_that_does(cfg, printed, capsys):
    with pytest.raises(ValueError, match=r"needs 8\d\.\d GB in phase train") as refused:
        printed(*NEMO_RL)
    assert "GB too much" in capsys.readouterr().out
    suggested = cfg(*NEMO_RL, *shlex.split(str(refused.value).partition("that fits: ")[2]))
    assert plan_job(shaped_job(suggested)).fits


def test_plan_of_a_state_on_the_hosts_while_engines_are_awake(printed, capsys):
    with pytest.raises(
        ValueError, match=r"115\.1 GB in phase generate.*use 76\.5\nhint: fits with"
    ):
        printed(*OFFLOADS)
    capsys.readouterr()
    lines = printed(*OFFLOADS, "train.offload=all").splitlines()
    first = next(line for line in lines if line.startswith("    0 "))
    assert first.split()[:4] == ["0", "0.000", "0.000", "0.000"]
    phases = lines[lines.index("train.offload all: GB of stage 0 in each phase") + 1 :]
    names = ["log-probabilities", "train", "push", "generate"]
    assert [line.split()[0] for line in phases[:4]] == names
    assert phases[3].endswith("weights, optimizer on the host; gradients freed")
    # 14 bytes per parameter of the outer stages, 12 of them over four data ranks; at 64 GB/s.
    leaving, back = "to the host 22.7 GB 0.35 s 0.14 s the push", "back 22.7 GB 0.35 s 0.21 s"
    assert " ".join(phases[6].split()) == leaving
    assert " ".join(phases[7].split()).startswith(back)
    host = phases[phases.index("host memory of a node") + 1 :][:4]
    assert [row.split()[0] for row in host] == ["181.6", "181.6", "363.3", "1,800.0"]


@pytest.mark.parametrize(
    ("part", "in_push", "in_generation", "copies"),
    [
        ("gradients", "gradients freed", "gradients freed", None),
        ("weights", "", "weights on the host", (9.1, 0.14, 0.14)),
        ("reference", "reference on the host", "reference on the host", (0.0, 0.0, 0.0)),
    ],
)
def test_plan_of_offloading_a_single_part(printed, part, in_push, in_generation, copies):
    small = ("rollout.vllm.gpu_memory_utilization=0.3", "grpo.beta=0.01", SMALL_BATCH)
    found = printed(*OFFLOADS, *small, f"train.offload=[{part}]")
    _, *phases = found.partition(f"train.offload [{part}]: GB of")[2].splitlines()[:5]
    assert [row.split(maxsplit=2)[2:] for row in phases[:2]] == [[], []]
    assert [" ".join(row.split()[2:]) for row in phases[2:]] == [in_push, in_generation]
    rows = [" ".join(line.split()) for line in found.splitlines()]
    if copies is None:
        assert not any(row.startswith("copies per generation") for row in rows)
        return
    gigabytes, seconds, hidden = copies  # the reference never changes: its copy is kept
    assert f"to the host {gigabytes} GB {seconds:.2f} s {hidden:.2f} s the push" in rows
    assert "back 9.1 GB 0.14 s 0.00 s log-probability passes" in rows


TWELVE_RANKS = ("parallel.tensor_parallel_size=4", "parallel.data_parallel_size=3")
TWELVE_RANKS += ("parallel.pipeline_parallel_size=1", "rollout.tensor_parallel_size=4")


@pytest.mark.parametrize(
    ("overrides", "options", "message"),
    [
        (["rollout.vllm.gpu_memory_utilization=0.2"], {}, r"leaves nothing.*use 0\.21 or more"),
        (
            [*TWELVE_RANKS, "rollout.num_engines=1"],
            {},
            r"12 ranks do not fill nodes of 8 GPUs: set parallel.data_parallel_size to 4",
        ),
        ([], {"num_gpus": 32}, r"needs 64 GPUs.*has 32 in all; use --gpus 64"),
        ([], {"gpu": "h300"}, r"unknown GPU 'h300'.*a100, h100, h200, b200"),
        (["rollout.router_replay=true"], {}, r"router_replay true needs a mixture of experts"),
        (
            ["rollout.engine=sglang", "rollout.vllm={}", "rollout.quantization=fp8"],
            {"gpu": "a100"},
            r"capability 8\.9 or more, not 8\.0, for which SGLang rearranges",
        ),
        ([], {"num_gpus": 8, "show": print_suggestions}, "no layout fits on 8 h100: use more GPUs"),
    ],
)
def test_plan_refuses_what_cannot_work_with_a_legal_value(printed, overrides, options, message):
    with pytest.raises(ValueError, match=message):
        printed(*overrides, **options)


# GPUs of a job

FULL = EngineBytes(
    weights=80 * 10**9,
    pushed=0,
    cache=0,
    token_bytes=1,
    sequence_bytes=0,
    cached_tokens=0,
    outside=0,
)


def with_sizes(cfg, ranks, engines, tensor):
    return cfg(
        f"parallel={{data_parallel_size: {ranks}}}",
        f"rollout.num_engines={engines}",
        f"rollout.tensor_parallel_size={tensor}",
    )


@pytest.mark.parametrize(
    ("ranks", "engines", "tensor", "engine", "num_gpus"),
    [
        (3, 2, 2, None, 8),  # one GPU is idle: engines begin at even ones
        (1, 9, 3, None, 40),  # two engines on each node
        (8, 3, 16, None, 48),  # 6 nodes, the first of them with the ranks
        (8, 3, 16, FULL, 56),
    ],
)
def test_min_gpus_is_the_fewest_on_which_a_job_can_be_placed(
    cfg, ranks, engines, tensor, engine, num_gpus
):
    job = with_sizes(cfg, ranks, engines, tensor)
    assert min_gpus(job, CARD, engine) == num_gpus
    assert gpu_use(job, CARD, num_gpus).is_shared is (tensor == 16 and engine is None)


def test_plan_names_ways_to_use_idle_gpus(cfg, printed, capsys):
    half = "parallel.data_parallel_size=1", "rollout.num_engines=2"
    found = printed(*half, num_gpus=64)
    assert "\nGPUs: 32 train, 16 generate, 16 idle\n" in found
    [hint] = [line for line in found.splitlines() if line.startswith("hint: for the idle: ")]
    *ways, last = hint.removeprefix("hint: for the idle: ").split(", or ")
    assert ways == ["rollout.num_engines=4"]  # 48 ranks would not divide the batch
    assert last == "--suggest --gpus 64"
    assert ", none idle\n" in printed(*half, *ways, num_gpus=64)


def test_gpu_use_counts_a_gpu_once_that_ranks_and_engines_share(cfg):
    # The first six places of each of two nodes: eight ranks, and six engines beside them.
    use = gpu_use(with_sizes(cfg, 8, 12, 1), CARD, 16)
    assert (use.training, use.generating, use.idle) == (8, 12, 2)


def test_plan_refuses_generations_ahead_on_shared_gpus_that_could_be_divided(cfg):
    ahead = ("rollout.max_staleness=1", "rollout.tensor_parallel_size=4", SMALL_BATCH)
    layout = "parallel={data_parallel_size: 8}"
    job = cfg(*ahead, layout, "rollout.num_engines=2")
    assert min_gpus(job, CARD, None) == 16
    with pytest.raises(ValueError, match=r"8 ranks would share 15 GPUs with engines of 8"):
        plan_job(shaped_job(job, 15))
    one = cfg(*ahead, UNKNOWN, "rollout.num_engines=1")  # so that nothing is simulated
    with pytest.raises(ValueError, match=r"share 5 GPUs"):
        suggest(shaped_job(one, 5))


def test_gpu_use_refuses_too_few_for_the_engines(cfg):
    with pytest.raises(ValueError, match=r"engines \(3 .* 16\) 48, but the job has 40"):
        gpu_use(with_sizes(cfg, 8, 3, 16), CARD, 40)
    job = with_sizes(cfg, 8, 1, 12)
    with pytest.raises(ValueError, match=r"12 does not fill nodes of 8 GPUs: set it to 8.* 16"):
        gpu_use(job, CARD, min_gpus(job, CARD, None))


@pytest.mark.long
def test_plan_of_a_replay_has_no_engines(cfg, printed, figures):
    """An engine size that does not fill nodes does not matter, either."""
    replay = ("train.replay=runs/other", "eval.data=null", "rollout.tensor_parallel_size=12")
    replay += (SMALL_BATCH,)
    job = *replay, "rollout.enable_sleep_mode=true", "train.offload=all", "rollout.num_engines=100"
    found = figures(*job)
    assert (found["num_gpus"], found["is_shared"]) == (64, False)
    assert [found[part] for part in ("engine", "rollout", "push", "host")] == [None] * 4
    # 0.6 GB and 5 groups of ranks, without buffers of a push.
    assert {stage["buffers"] for stage in found["stages"]} == {3_100_000_000}
    assert all({"push", "generate"}.isdisjoint(stage["phases"]) for stage in found["stages"])
    assert "\nengines: none (train.replay)\n" in printed(*job)
    few = cfg(*replay, *(f"parallel.{axis}_parallel_size=1" for axis in ("tensor", "pipeline")))
    assert min_gpus(few, CARD, None) == few.dims.world_size == 2
    [first, *_] = suggest(shaped_job(cfg(*job), 64))
    assert first.cfg.dims.world_size == 64
    assert not any("num_engines" in word for word in first.overrides)


def test_plan_gives_a_reward_model_gpus_of_its_own(cfg, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"0" * 20_000_000)
    model = f"{{name: reward_model, arguments: {{path: {tmp_path}, tensor_parallel_size: 2}}}}"
    layout = "parallel.tensor_parallel_size=4", "parallel.data_parallel_size=1"
    layout += "parallel.pipeline_parallel_size=1", "eval.data=null"
    engine = "rollout.num_engines=1", "rollout.tensor_parallel_size=2"
    job = cfg(*layout, *engine, f"reward.functions=[{model}]")
    assert min_gpus(job, CARD, None) == 8
    assert [gpu_use(job, CARD, number).is_shared for number in (8, 7)] == [False, True]
    with pytest.raises(
        ValueError, match=r"\(1 of .* 2\) 2, and reward models 2, but .* use --gpus 6"
    ):
        gpu_use(job, CARD, 5)
    whole = replace(shaped_job(job), card=replace(CARD, memory=10**12))
    table = job_table(whole, "h100", plan_job(whole))
    assert "     0.02 GB  weights in its files\n" in table
    assert "           2  GPUs of rank 0's node, its own" in table


def test_plan_counts_a_reward_model_that_gpu_use(printed, figures, monkeypatch, tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"0" * 20_000_000)
    vllm = "vllm: {gpu_memory_utilization: 0.1}"
    model = f"path: {tmp_path}, tensor_parallel_size: 2, share_gpus: true, {vllm}"
    function = f"reward.functions=[{{name: reward_model, arguments: {{{model}}}}}]"
    options = (*OFFLOADS, "train.offload=all", "rollout.vllm.gpu_memory_utilization=0.7")
    options += ("eval.data=null",)
    alone, shared = (figures(*options, *more) for more in ([], [function]))
    assert shared["num_gpus"] == alone["num_gpus"] == 64
    (first, *others), (changed, *same) = alone["stages"], shared["stages"]
    assert same == others  # ranks 0 and 1 are of the first stage
    assert changed["phases"] == first["phases"] | {"generate": 0.8 * CARD.memory}
    assert changed["away"] == first["away"]
    context = 600 * 10**6 + 500 * 10**6  # of CUDA and NCCL
    assert changed["engine"] - first["engine"] == context
    assert shared["host"]["total"] - alone["host"]["total"] == 2 * 20_000_000
    assert shared["host"]["scoring_seconds"] == 10_000_000 / CARD.host_rate
    table = printed(*options, function)
    assert "           2  GPUs of rank 0's node, shared with ranks\n" in table
    assert "\nreward models, each way " in table
    with pytest.raises(ValueError, match=r"needs 83\.8 GB in phase generate, but may use 76\.5"):
        printed(*options, "rollout.vllm.gpu_memory_utilization=0.8", function)
    monkeypatch.setitem(CARDS, "h100", replace(CARD, host_memory=10**12))
    with file.open("ab") as weights:
        weights.truncate(10**12)
    advice = r"(?s)2000\.0 for reward models that sleep.* more GPUs, or share_gpus=false, for"
    with pytest.raises(ValueError, match=advice):
        printed(*options, function)


# Lengths and suggestions


def test_plan_takes_lengths_of_a_file_or_of_a_runs_completions(printed, tmp_path):
    file = tmp_path / "lengths.txt"
    file.write_text("\n".join(["500"] * 90 + ["3000"] * 10))
    assert printed().count("--lengths") == 1
    text = printed(lengths_file=file)
    assert "--lengths" not in text
    assert all(row in text for row in ("  383,500  tokens\n", "  48  microbatches"))
    file = tmp_path / "completions.jsonl"
    rows = [{"num_tokens": 500}] * 90 + [{"num_tokens": 2000}] * 10
    file.write_text("\n".join(map(json.dumps, rows)) + "\n")
    tokens = 512 * 1024 + 461 * 500 + 51 * 2000
    assert f"  {tokens:,}  tokens\n" in printed(lengths_file=file)
    with pytest.raises(ValueError, match=r"without those of prompts: set data.max_prompt_length"):
        printed(UNKNOWN, lengths_file=file)
    file.write_text("300\n")
    with pytest.raises(ValueError, match=r"without num_tokens: give a run's completions.jsonl"):
        printed(lengths_file=file)


@pytest.mark.long
def test_suggestions_count_shared_prompts(figures):
    def seconds(*overrides: str) -> dict[tuple[str, ...], float]:
        found = figures(ROOM, *overrides, show=print_suggestions)
        return {tuple(each["overrides"]): each["step"]["estimate_seconds"] for each in found}

    shared, unshared = seconds(SHARED), seconds()
    assert shared.keys() == unshared.keys()
    assert all(shared[layout] < unshared[layout] / 1.15 for layout in shared)


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ("--instantiate --json --gpus 64", "--instantiate cannot be combined with --json, --gpus"),
        ("--with a=1 --instantiate", "--instantiate cannot be combined with --with"),
        ("--suggest --with a=1", "--suggest cannot be combined with --with"),
    ],
)
def test_plan_refuses_options_that_exclude_others(options, refused):
    with pytest.raises(typer.BadParameter, match=refused):
        app(["plan", "nowhere.yaml", *options.split()], standalone_mode=False)
