"""`megatron-grpo plan`, as people and scripts use it."""

import json
import re
import shlex
from collections.abc import Sequence
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
from megatron_grpo.planning.job_plan import min_gpus, plan_job, shares_gpus
from megatron_grpo.planning.memory import EngineBytes
from megatron_grpo.planning.suggest import suggest
from megatron_grpo.planning.workload import Job

CONFIGS = Path(__file__).parents[3] / "configs"
DEFAULTS = {"gpu": "h100", "num_gpus": None, "lengths_file": None, "as_json": False}
TWELVE_RANKS = ("parallel.tensor_parallel_size=4", "parallel.data_parallel_size=3")
TWELVE_RANKS += ("parallel.pipeline_parallel_size=1",)
SMALL_BATCH = "grpo.generation_batch_size=512"
"""Packing it for every layout takes a third of the time."""
NEMO_RL = ("parallel.tensor_parallel_size=4", "parallel.data_parallel_size=4")
"""Its layout for 70B: beside an engine that keeps its memory, too much."""


@pytest.fixture
def cfg(tmp_path):
    """The shipped config of the 70B run."""
    folder = write_config(tmp_path, "Llama-3.3-70B")

    def load(*overrides):
        return load_config(CONFIGS / "grpo_70b.yaml", [f"model.path={folder}", *overrides])

    return load


def test_the_table_has_memory_work_and_links(cfg, capsys):
    print_plan(cfg(), **DEFAULTS)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(
        "llama in bfloat16 on 64 h100: trainer tp(8) * pp(4) * cp(1) * dp(2); 8 engines of 8 "
        "GPUs, on the same GPUs"
    )
    first = next(line for line in lines if line.startswith("    0 "))
    assert first.split()[:5] == ["0", "4.542", "9.083", "13.625", "0.000"]
    assert any(line.endswith("GB free") for line in lines)
    assert any("512 sequences, 2,097,152 tokens in 256 microbatches" in line for line in lines)
    purposes = [line.partition("  ")[0] for line in lines if line.endswith(" s")]
    assert purposes[-4:] == ["tensor", "pipeline", "data", "push, 1 step of 4"]


def test_with_muon_the_layout_of_70b_fits(cfg):
    muon = cfg("optimizer.optimizer=muon")
    plan = plan_job(Job(muon, read_shape(muon.model.path), CARDS["h100"], [4096]))
    assert plan.fits
    matrices, embedding = 80 * 8192 * (2 * 8192 + 2 * 1024 + 3 * 28672), 128256 * 8192
    # On the first of 4 stages, the embedding is all in the range of the second of 2 data ranks. Of
    # what the first has, a tensor rank sends 7 of 8 elements, float32, and gets them back.
    owned = (matrices / 4 + embedding) / 2 / 8
    links = {link.purpose: link.num_bytes for link in plan.time.links}
    assert links["muon"] == 2 * 4 * owned * 7 / 8


def test_a_push_is_of_every_step_only_where_every_step_generates(cfg, capsys):
    print_plan(cfg("grpo.steps_per_generation=1", "grpo.num_iterations=2"), **DEFAULTS)
    assert "\npush, 1 step of 2  " in capsys.readouterr().out
    print_plan(cfg("grpo.steps_per_generation=1"), **DEFAULTS)
    assert "\npush     " in capsys.readouterr().out


def test_on_one_node_a_push_does_not_cross_the_network(tmp_path):
    folder = write_config(tmp_path, "Llama-3.1-8B")
    cfg = load_config(CONFIGS / "grpo_8b.yaml", [f"model.path={folder}"])
    shape, card = read_shape(folder), CARDS["h100"]
    assert plan_job(Job(cfg, shape, card, [4096])).push.in_node
    assert not plan_job(Job(cfg, shape, card, [4096], 16)).push.in_node


def test_only_engines_on_gpus_of_their_own_generate_beside_the_training(cfg, capsys):
    def shown(*overrides: str, **options: Any) -> list[list[str]]:
        print_plan(cfg(*overrides), **DEFAULTS | options)
        lines = capsys.readouterr().out.splitlines()
        heads = [number for number, line in enumerate(lines) if line.startswith("rollout.max_st")]
        return [line.split() for head in heads for line in lines[head + 1 : head + 7]]

    assert shown() == []
    apart = ("parallel.data_parallel_size=1", "rollout.num_engines=4"), {"num_gpus": 64}
    rows = shown(*apart[0], **apart[1])
    assert [row[0].strip(",") for row in rows] == ["0", "1", "1", "2", "4", "8"]
    assert [row[1] for row in rows if "*" in row] == ["*"] and "*" in rows[0]
    more = "rollout.max_staleness=3", "rollout.in_flight_updates=true"
    rows = shown(*apart[0], *more, **apart[1])
    assert [row[:4] for row in rows if "*" in row] == [["3,", "in", "flight", "*"]]

    print_plan(cfg(*apart[0]), **DEFAULTS | apart[1] | {"as_json": True})
    found = json.loads(capsys.readouterr().out)
    synchronous, ahead = found["asynchrony"][:2]
    updates = 4 * found["step"]["estimate_seconds"]
    assert synchronous["trainer_busy"] * synchronous["seconds"] == pytest.approx(updates)
    # As long as the longest, completions of one length take what the bound says, and a prompt more.
    generate = synchronous["seconds"] - updates - found["push"]["seconds"]
    assert generate == pytest.approx(found["rollout"]["seconds"], rel=0.1)
    assert ahead["seconds"] < synchronous["seconds"]


def test_with_shared_prompts_the_figures_are_those_of_the_computed_tokens(cfg, capsys):
    def figures(*overrides: str) -> dict[str, Any]:
        room = "train.max_tokens_per_microbatch=16384"
        print_plan(cfg(room, *overrides), **DEFAULTS | {"as_json": True})
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    off, on = figures(), figures("grpo.shared_prompts=true")
    assert off["fits"] and off["is_shared"] and off["num_gpus"] == 64
    assert off["push"]["seconds"] == pytest.approx(0.353, abs=0.001)
    assert off["workload"]["computed_tokens"] == 512 * 4096
    # Five completions of 3,072 fit with one prompt, and the last three of a group of eight.
    assert on["workload"]["computed_tokens"] == 64 * (2 * 1023 + 8 * 3073)
    assert on["step"]["flops"] < off["step"]["flops"] / 1.2
    (sent, sent_unshared) = (each["step"]["links"][0]["num_bytes"] for each in (on, off))
    filled = on["workload"]["computed_tokens"] + on["workload"]["padding"]
    assert sent == pytest.approx(sent_unshared * filled / (512 * 4096))


def test_shared_prompts_of_unknown_length_are_not_counted_and_the_plan_says_so(cfg, capsys):
    on, unknown = "grpo.shared_prompts=true", "data.max_prompt_length=null"

    def printed(*overrides: str, as_json: bool = False) -> str:
        print_plan(cfg(*overrides), **DEFAULTS | {"as_json": as_json})
        return capsys.readouterr().out

    assert "\ngrpo.shared_prompts: " not in printed(on) + printed(unknown)
    assert "\ngrpo.shared_prompts: " in printed(on, unknown)
    figures = [json.loads(printed(unknown, *each, as_json=True)) for each in ((), (on,))]
    assert [each.pop("not_counted") for each in figures] == [[], ["grpo.shared_prompts"]]
    assert figures[0] == figures[1]


@pytest.fixture
def compared(tmp_path, capsys):
    """Output of `plan --with` for the 70B run."""
    folder = write_config(tmp_path, "Llama-3.3-70B")

    def run(*changes: str, options: Sequence[str] = ()) -> str:
        words = [word for change in changes for word in ("--with", change)]
        given = [str(CONFIGS / "grpo_70b.yaml"), f"model.path={folder}", SMALL_BATCH]
        app(["plan", *given, *words, *options], standalone_mode=False)
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize(
    ("changes", "differ"),
    [
        (
            ["model.megatron.fp8=e4m3", "model.megatron.fp8_recipe=blockwise"],
            {"temporary", "sum in phase train", "a step, at least", "a step, estimated"},
        ),
        (
            ["grpo.shared_prompts=true", "train.max_tokens_per_microbatch=16384"],
            {"microbatches of a model copy", "tokens of a step", "a step, estimated"},
        ),
        (
            ["parallel.overlap_grad_reduce=true"],
            {"a step, estimated", "traffic that is not hidden"},
        ),
        (
            ["rollout.quantization=int8"],
            {"a push, at least", "a generation, at least", "tokens that an engine caches"},
        ),
        (
            ["rollout.enable_sleep_mode=true", "train.offload=all"],
            {"sum in phase generate", "memory of a node's host"},
        ),
        (["parallel.data_parallel_size=4"], {"GPUs", "microbatches of a model copy"}),
        (["parallel.tensor_parallel_size=4"], {"fits", "weights", "sum in phase train"}),
    ],
)
def test_with_prints_figures_of_both_configs_and_marks_those_that_differ(compared, changes, differ):
    title, _, head, *rows = compared(*changes).splitlines()
    assert all(change in title for change in changes)
    assert head.split() == ["as", "it", "is", "with"]
    cells = [re.split(r"  +", row.strip()) for row in rows]
    marked = {label for label, *_, star in cells if star == "*"}
    assert differ <= marked
    assert all((one == other) is (label not in marked) for label, one, other, *_ in cells)


def test_with_prints_both_plans_as_json(cfg, capsys, compared):
    change = "train.max_tokens_per_microbatch=8192"
    found = json.loads(compared(change, options=["--json", "--gpus", "128"]))
    assert [*found] == ["config", "with"]
    for overrides, each in ([], found["config"]), ([change], found["with"]):
        print_plan(cfg(SMALL_BATCH, *overrides), **DEFAULTS | {"num_gpus": 128, "as_json": True})
        assert json.loads(capsys.readouterr().out) == each


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
def test_with_what_is_refused_ends_with_its_message_and_names_it(compared, change, message):
    with pytest.raises(ValueError, match=f"^--with {change}: .*{message}"):
        compared(change)


def test_a_card_without_attention_over_packed_sequences_needs_another_package(cfg, capsys):
    local = "model.megatron.transformer_impl=local"
    for card, override, is_told in (
        ("a100", [], True),
        ("a100", [local], False),
        ("a100", ["grpo.shared_prompts=true"], False),
        ("h100", [], False),
    ):
        print_plan(cfg(SMALL_BATCH, *override), **DEFAULTS | {"gpu": card})
        told = "Transformer Engine needs flash-attn on a100" in capsys.readouterr().out
        assert told == is_told, (card, override)


def test_what_does_not_fit_is_refused_with_a_layout_that_does(cfg, capsys):
    with pytest.raises(ValueError, match=r"needs 8\d\.\d GB in phase train") as refused:
        print_plan(cfg(*NEMO_RL), **DEFAULTS)
    assert "GB too much" in capsys.readouterr().out
    suggested = cfg(*shlex.split(str(refused.value).partition("that fits: ")[2]))
    plan = plan_job(Job(suggested, read_shape(suggested.model.path), CARDS["h100"], [4096]))
    assert plan.fits


OFFLOADS = (*NEMO_RL, "rollout.enable_sleep_mode=true", "rollout.vllm.gpu_memory_utilization=0.8")


def test_a_layout_that_fits_beside_no_awake_engine_fits_with_its_state_on_the_hosts(cfg, capsys):
    with pytest.raises(ValueError, match=r"115\.1 GB in phase generate.*use 76\.5; it fits with"):
        print_plan(cfg(*OFFLOADS), **DEFAULTS)
    capsys.readouterr()
    print_plan(cfg(*OFFLOADS, "train.offload=all"), **DEFAULTS)
    lines = capsys.readouterr().out.splitlines()
    assert lines[3].split()[:4] == ["0", "0.000", "0.000", "0.000"]
    phases = lines[lines.index("train.offload all: stage 0 in each phase, in GB") + 1 :]
    assert [line.split()[0] for line in phases[:4]] == [
        "log-probabilities",
        "train",
        "push",
        "generate",
    ]
    assert phases[3].endswith("weights, optimizer on the host; gradients freed")
    # 14 bytes per parameter of the outer stages, of which four data ranks share 12; at 64 GB/s.
    assert "copies 22.7 GB to its host before a generation, in at least 0.35 s" in phases[4]
    assert "of which the push hides 0.14 s, and 22.7 GB back after it, in at least" in phases[4]
    assert "may use 1800.0: 181.6 for train.offload, 181.6 for a checkpoint" in phases[5]


@pytest.mark.parametrize(
    ("part", "in_push", "in_generation", "copies"),
    [
        ("gradients", "gradients freed", "gradients freed", None),
        ("weights", "", "weights on the host", (9.1, 0.14, 0.14)),
        ("reference", "reference on the host", "reference on the host", (0.0, 0.0, 0.0)),
    ],
)
def test_a_part_may_leave_alone(cfg, capsys, part, in_push, in_generation, copies):
    small = ("rollout.vllm.gpu_memory_utilization=0.3", "grpo.beta=0.01", SMALL_BATCH)
    print_plan(cfg(*OFFLOADS, *small, f"train.offload=[{part}]"), **DEFAULTS)
    _, _, told = capsys.readouterr().out.partition(f"train.offload [{part}]: stage ")
    phases, after = told.splitlines()[1:5], told.splitlines()[5]
    assert [row.split(maxsplit=2)[2:] for row in phases[:2]] == [[], []]
    assert [" ".join(row.split()[2:]) for row in phases[2:]] == [in_push, in_generation]
    if copies is None:
        assert after == ""
        return
    gigabytes, seconds, hidden = copies  # a reference that stays as it is has been copied
    assert f"copies {gigabytes} GB to its host" in after
    assert f"{seconds:.2f} s at 64 GB/s, of which the push hides {hidden:.2f} s" in after
    back = "9.1 GB back after it, in at least 0.14 s, of which log-probability passes hide 0.00 s"
    assert back in after


@pytest.mark.parametrize(
    ("overrides", "options", "message"),
    [
        (["rollout.vllm.gpu_memory_utilization=0.2"], {}, r"leaves nothing.*use 0\.21 or more"),
        (
            [*TWELVE_RANKS, "rollout.num_engines=1", "rollout.tensor_parallel_size=4"],
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
    ],
)
def test_a_plan_that_cannot_work_is_refused_with_a_legal_value(cfg, overrides, options, message):
    with pytest.raises(ValueError, match=message):
        print_plan(cfg(*overrides), **DEFAULTS | options)


FULL = EngineBytes(
    weights=80 * 10**9,
    pushed=0,
    cache=0,
    token_bytes=1,
    sequence_bytes=0,
    cached_tokens=0,
    outside=0,
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
def test_a_job_has_the_gpus_on_which_it_can_be_placed(
    cfg, ranks, engines, tensor, engine, num_gpus
):
    job, card = job_of(cfg, ranks, engines, tensor), CARDS["h100"]
    assert min_gpus(job, card, engine) == num_gpus
    assert shares_gpus(job, card, num_gpus) is (tensor == 16 and engine is None)


def test_generations_are_not_made_ahead_on_shared_gpus_that_could_be_divided(cfg):
    ahead = ("rollout.max_staleness=1", "rollout.tensor_parallel_size=4", SMALL_BATCH)
    layout = "parallel={data_parallel_size: 8}"
    job, card = cfg(*ahead, layout, "rollout.num_engines=2"), CARDS["h100"]
    shape = read_shape(job.model.path)
    assert min_gpus(job, card, None) == 16
    with pytest.raises(ValueError, match=r"8 ranks, and engines of 8 GPUs .* share 15 GPUs"):
        plan_job(Job(job, shape, card, [4096], 15))
    length = "data.max_prompt_length=null"  # so that nothing is simulated
    one = cfg(*ahead, length, "rollout.num_engines=1")
    with pytest.raises(ValueError, match=r"share 5 GPUs"):
        suggest(Job(one, shape, card, [4096], 5))


def job_of(cfg, ranks, engines, tensor):
    return cfg(
        f"parallel={{data_parallel_size: {ranks}}}",
        f"rollout.num_engines={engines}",
        f"rollout.tensor_parallel_size={tensor}",
    )


@pytest.mark.long
def test_a_replay_is_planned_without_engines(cfg, capsys):
    """Their size, which does not fill nodes here, does not matter either."""
    replay = ("train.replay=runs/other", "eval.data=null", "rollout.tensor_parallel_size=12")
    replay += (SMALL_BATCH,)
    offload = ("rollout.enable_sleep_mode=true", "train.offload=all")
    job = cfg(*replay, *offload, "rollout.num_engines=100")
    print_plan(job, **DEFAULTS | {"as_json": True})
    figures = json.loads(capsys.readouterr().out)
    assert (figures["num_gpus"], figures["is_shared"]) == (64, False)
    assert [figures[part] for part in ("engine", "rollout", "push", "host")] == [None] * 4
    # 0.6 GB and 5 groups of ranks, without buffers of a push.
    assert {stage["buffers"] for stage in figures["stages"]} == {3_100_000_000}
    assert all({"push", "generate"}.isdisjoint(stage["phases"]) for stage in figures["stages"])
    print_plan(job, **DEFAULTS)
    assert "; no engines, for train.replay\n" in capsys.readouterr().out
    few = cfg(*replay, *(f"parallel.{axis}_parallel_size=1" for axis in ("tensor", "pipeline")))
    assert min_gpus(few, CARDS["h100"], None) == few.dims.world_size == 2
    [first, *_] = suggest(Job(job, read_shape(job.model.path), CARDS["h100"], [4096], 64))
    assert first.cfg.dims.world_size == 64
    assert not any("num_engines" in word for word in first.overrides)


def test_a_job_without_the_gpus_of_its_engines_is_refused(cfg):
    with pytest.raises(ValueError, match=r"3 engines.* need 48, but the job has 40"):
        shares_gpus(job_of(cfg, 8, 3, 16), CARDS["h100"], 40)
    job = job_of(cfg, 8, 1, 12)
    with pytest.raises(ValueError, match=r"12 does not fill nodes of 8 GPUs: set it to 8.* 16"):
        shares_gpus(job, CARDS["h100"], min_gpus(job, CARDS["h100"], None))


def test_a_reward_model_has_gpus_of_its_own(cfg, capsys, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"0" * 20_000_000)
    model = f"{{name: reward_model, arguments: {{path: {tmp_path}, tensor_parallel_size: 2}}}}"
    layout = "parallel.tensor_parallel_size=4", "parallel.data_parallel_size=1"
    job = cfg(
        *layout,
        "parallel.pipeline_parallel_size=1",
        "rollout.num_engines=1",
        "rollout.tensor_parallel_size=2",
        f"reward.functions=[{model}]",
        "eval.data=null",
    )
    card = CARDS["h100"]
    assert min_gpus(job, card, None) == 8
    assert not shares_gpus(job, card, 8)
    assert shares_gpus(job, card, 7)
    with pytest.raises(ValueError, match=r"need 2, and reward models 2, but .* use --gpus 6"):
        shares_gpus(job, card, 5)
    whole = Job(job, read_shape(job.model.path), replace(card, memory=10**12), [4096])
    line = job_table(whole, "h100", plan_job(whole)).splitlines()
    assert any(
        "has 0.02 GB of weights in its files, for 2 GPUs of its own" in each for each in line
    )


def test_a_reward_model_that_shares_gpus_takes_its_share_while_it_scores(
    cfg, capsys, monkeypatch, tmp_path
):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"0" * 20_000_000)
    vllm = "vllm: {gpu_memory_utilization: 0.1}"
    model = f"path: {tmp_path}, tensor_parallel_size: 2, share_gpus: true, {vllm}"
    function = f"reward.functions=[{{name: reward_model, arguments: {{{model}}}}}]"
    options = (*OFFLOADS, "train.offload=all", "rollout.vllm.gpu_memory_utilization=0.7")

    def planned(*overrides, as_json=True):
        print_plan(cfg(*options, "eval.data=null", *overrides), **DEFAULTS | {"as_json": as_json})
        return capsys.readouterr().out

    alone, beside = (json.loads(planned(*more)) for more in ([], [function]))
    assert beside["num_gpus"] == alone["num_gpus"] == 64
    (first, *others), (changed, *same) = alone["stages"], beside["stages"]
    assert same == others  # ranks 0 and 1 are of the first stage
    assert changed["phases"] == first["phases"] | {"generate": 0.8 * CARDS["h100"].memory}
    assert changed["away"] == first["away"]
    context = 600 * 10**6 + 500 * 10**6  # of CUDA and NCCL
    assert changed["engine"] - first["engine"] == context
    assert beside["host"]["total"] - alone["host"]["total"] == 2 * 20_000_000
    assert beside["host"]["scoring_seconds"] == 10_000_000 / CARDS["h100"].host_rate
    table = planned(function, as_json=False)
    assert "for 2 GPUs that it shares on the node of rank 0" in table
    assert "copies of weights of reward models that sleep, beside the scoring: at least" in table
    with pytest.raises(ValueError, match=r"needs 83\.8 GB in phase generate, but may use 76\.5"):
        planned("rollout.vllm.gpu_memory_utilization=0.8", function)
    small = replace(CARDS["h100"], host_memory=10**12)
    monkeypatch.setitem(CARDS, "h100", small)
    with file.open("ab") as weights:
        weights.truncate(10**12)
    told = r"2000\.0 for reward models that sleep, with share_gpus.* GPUs, or share_gpus=false, for"
    with pytest.raises(ValueError, match=told):
        planned(function)


def test_lengths_of_a_file_make_the_microbatches(cfg, capsys, tmp_path):
    file = tmp_path / "lengths.txt"
    file.write_text("\n".join(["500"] * 90 + ["3000"] * 10))
    print_plan(cfg(), **DEFAULTS | {"lengths_file": file})
    text = capsys.readouterr().out
    assert "512 sequences, 383,500 tokens in 48 microbatches" in text


def test_lengths_may_be_those_of_a_runs_completions(cfg, capsys, tmp_path):
    file = tmp_path / "completions.jsonl"
    rows = [{"num_tokens": 500}] * 90 + [{"num_tokens": 2000}] * 10
    file.write_text("\n".join(map(json.dumps, rows)) + "\n")
    print_plan(cfg(), **DEFAULTS | {"lengths_file": file})
    tokens = 512 * 1024 + 461 * 500 + 51 * 2000
    assert f"512 sequences, {tokens:,} tokens" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"without those of prompts: set data.max_prompt_length"):
        print_plan(cfg("data.max_prompt_length=null"), **DEFAULTS | {"lengths_file": file})
    file.write_text("300\n")
    with pytest.raises(ValueError, match=r"without num_tokens: give a run's completions.jsonl"):
        print_plan(cfg(), **DEFAULTS | {"lengths_file": file})


@pytest.mark.long
def test_suggestions_count_shared_prompts(cfg, capsys):
    def seconds(*overrides: str) -> dict[tuple[str, ...], float]:
        room = "train.max_tokens_per_microbatch=16384"
        print_suggestions(cfg(room, *overrides), **DEFAULTS | {"as_json": True})
        found = json.loads(capsys.readouterr().out)
        return {tuple(each["overrides"]): each["step"]["estimate_seconds"] for each in found}

    shared, unshared = seconds("grpo.shared_prompts=true"), seconds()
    assert shared.keys() == unshared.keys()
    assert all(shared[layout] < unshared[layout] / 1.15 for layout in shared)


def test_where_nothing_fits_that_is_said(cfg):
    with pytest.raises(ValueError, match="no layout fits on 8 h100: use more GPUs"):
        print_suggestions(cfg(), **DEFAULTS | {"num_gpus": 8})


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ("--instantiate --json --gpus 64", "--instantiate cannot be combined with --json, --gpus"),
        ("--with a=1 --instantiate", "--instantiate cannot be combined with --with"),
        ("--suggest --with a=1", "--suggest cannot be combined with --with"),
    ],
)
def test_options_that_exclude_others_are_refused_with_them(options, refused):
    with pytest.raises(typer.BadParameter, match=refused):
        app(["plan", "nowhere.yaml", *options.split()], standalone_mode=False)
