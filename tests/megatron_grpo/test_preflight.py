"""Checks before any rank starts: what passes, and the text of refusals."""

import http.server
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from shutil import copyfile, copytree, rmtree
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from checkpoint_convert import hf_tensors, read_shape
from checkpoint_convert.peft import adapter_tensors, b_name
from checkpoint_convert.quantized.model import quantized_model
from helpers.models.published import write_config
from helpers.models.quantized import FORMATS, quantized_copy
from helpers.models.shapes import MIXTRAL_8X7B, QWEN3_30B
from helpers.models.tiny import add_mtp_layer, character_tokenizer, servable_model, tiny_model
from helpers.models.towers import tiny_multimodal
from helpers.runs.environments import write_environments
from helpers.runs.transformer_engines import write_transformer_engine
from megatron_grpo.config.config import Config
from megatron_grpo.config.file import dump_config, load_config
from megatron_grpo.config.lora import LoraConfig
from megatron_grpo.engines import support
from megatron_grpo.engines.support import (
    check_attention,
    check_card,
    check_drafts,
    check_kernels,
    check_served,
)
from megatron_grpo.policy.lora_targets import check_lora
from megatron_grpo.preflight import preflight
from megatron_grpo.resume_checks import check_same_run, check_start

REPOSITORY = Path(__file__).parents[2]
TINY = REPOSITORY / "configs" / "tiny_cpu.yaml"
TOKEN = "0123456789abcdef"
SGLANG = ("rollout.engine=sglang", "rollout.vllm={}")
HALF = "model.dtype=bfloat16"
AWARE = "rollout.quantization_aware=true"
WINDOWS = {"use_sliding_window": True, "sliding_window": 5}


def with_cache_scales(folder: Path) -> Path:
    model = servable_model(folder / "plain", "qwen3")
    quantized = quantized_copy(model, folder / "quantized", FORMATS["ModelOpt FP8"])
    weights = quantized / "model.safetensors"
    scale = {"model.layers.0.self_attn.k_proj.k_scale": torch.tensor(0.5)}
    save_file(load_file(weights) | scale, weights)
    return quantized


MODELS = {
    "dense": lambda folder: servable_model(folder, "qwen3"),
    "mixture": lambda folder: servable_model(folder, "qwen3_moe"),
    "sparse": lambda folder: servable_model(folder, "deepseek_v32"),
    "mamba": lambda folder: tiny_model(folder, "nemotron_h", num_attention_heads=8),
    "tower": lambda folder: tiny_multimodal(folder, "mistral3"),
    "windows": lambda f: servable_model(f, "qwen3", **WINDOWS, max_window_layers=1),
    "cache scales": with_cache_scales,
    "no windows": lambda f: servable_model(f, "qwen3", **WINDOWS, max_window_layers=0),
}


@pytest.fixture(scope="session")
def path_of(tmp_path_factory) -> Callable[[str], Path]:
    """The folder of one of MODELS."""
    made: dict[str, Path] = {}

    def path_of(name: str) -> Path:
        if name not in made:
            made[name] = MODELS[name](tmp_path_factory.mktemp(name.replace(" ", "_")))
        return made[name]

    return path_of


@pytest.fixture
def model(path_of) -> Path:
    return path_of("dense")


@pytest.fixture
def config(path_of, tmp_path, monkeypatch):
    """configs/tiny_cpu.yaml on one of MODELS and 20 rows, with overrides."""
    monkeypatch.chdir(REPOSITORY)  # the config names demo/rewards.py
    data = write_rows(
        tmp_path / "rows.jsonl", [{"prompt": f"question {i}", "answer": str(i)} for i in range(20)]
    )
    paths = [f"data.path={data}", f"train.run_dir={tmp_path / 'run'}"]

    def make(*overrides: str, model: str = "dense") -> Config:
        return load_config(TINY, [f"model.path={path_of(model)}", *paths, *overrides])

    return make


def write_rows(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def on_gpus(monkeypatch) -> Callable[..., None]:
    """Checks see engines on an H100, or on GPUs of another capability."""
    monkeypatch.setattr(support, "num_gpus", lambda: 1)

    def with_capability(*capability: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)

    with_capability(9, 0)
    return with_capability


def refusal(cfg: Config, token: str | None = TOKEN, kind: type[Exception] = ValueError) -> str:
    start = time.monotonic()
    with pytest.raises(kind) as refused:
        preflight(cfg, token)
    assert time.monotonic() - start < 10
    return str(refused.value)


def refusal_of(check: Callable[..., object], *arguments: Any) -> str:
    """The message with which a check refuses; empty if it passes."""
    try:
        check(*arguments)
    except ValueError as error:
        return str(error)
    return ""


def test_preflight_passes_what_can_run(config):
    preflight(config(), None)
    preflight(config("rollout.vllm.max_model_len=42"), None)  # 30 of a prompt, 12 of a completion
    preflight(config(model="no windows"), None)
    preflight(config(model="tower"), None)
    preflight(config("lora.r=4", model="tower"), None)


DRAFTS = "rollout.vllm.speculative_config={method: ngram, num_speculative_tokens: 2}"
OVERLONG = "{name: soft_overlong, arguments: {soft_max_length: 50, soft_cache_length: 60}}"
IN_EPOCHS = ("train.num_steps=null", "train.num_epochs=3", "grpo.num_iterations=2")
NO_MIXTURE = "needs a mixture of experts", "dense: leave it out"
REFUSED = [
    # Sizes that do not multiply.
    ("grpo.generation_batch_size=50 + grpo.num_generations=8", "50", "8", "48 or 56"),
    ("grpo.steps_per_generation=3", "16", "3", "2 or 4"),
    ("grpo.generation_batch_size=84", "needs 21 different prompts", "has 20"),
    ("EPOCHS + optimizer.lr_warmup_steps=30", "_steps 30 must be below train.num_steps 30"),
    # Axes of the mesh that the model or another axis does not allow.
    ("parallel.tensor_parallel_size=3", "tensor(3)", "num_attention_heads(4)", "[1, 2, 4]"),
    ("parallel.expert_parallel_size=2", "expert(2)", "qwen3 has none", "set 1"),
    ("rollout.router_replay=true", *NO_MIXTURE),
    ("model.freeze_moe_router=true", *NO_MIXTURE),
    ("rollout.tensor_parallel_size=3", "tensor_parallel_size(3)", "[1, 2, 4]"),
    ("mamba: parallel.tensor_parallel_size=8", "does not divide n_groups(4)"),
    ("mixture: parallel.sequence_parallel=false", "tensor_parallel_size to 1"),
    # Weights that do not divide into blocks.
    ("train.export_quantization=fp8", "blocks of 128 rows", "k_proj", "use fp8_channel"),
    (
        "train.export_quantization=nvfp4 + parallel.tensor_parallel_size=4",
        *("a rank has [64, 24] of", "down_proj", "use fewer tensor ranks"),
    ),
    # Lengths.
    ("train.max_tokens_per_microbatch=32", "30 tokens", "length 12", "= 32", "set it to 44"),
    (
        "rollout.vllm.max_model_len=41",
        *("data: a prompt of 30 tokens", "max_completion_length 12", "41: set", "at least 42"),
    ),
    # Upstream options.
    ("model.megatron.recompute_granularit=full", "recompute_granularit", "did you mean"),
    ("rollout.vllm.max_model_length=9", "did you mean max_model_len"),
    ("rollout.vllm={speculative_config: '{}'}", "vllm.speculative_config is '{}': give a table"),
    ("mixture: model.megatron.moe_expert_capacity_factor=1.0", "factor is not possible"),
    # Data and rewards.
    ("parallel.tensor_parallel_size=3 + data.path=none.jsonl", "tensor(3)"),
    (
        "reward.functions=[demo/rewards.py:exct] + data.max_prompt_length=1",
        "demo/rewards.py has no function or class 'exct'",
    ),
    ("train.hooks=[demo/rewards.py:Stop]", "demo/rewards.py has no function or class 'Stop'"),
    ("train.hooks=[mine.py:Stop]", "file of a hook mine.py does not exist"),
    (f"reward.functions=[{OVERLONG}]", "length 60", "below soft_max_length 50", "such as 10"),
    # Features that a kind of model lacks.
    ("SGLANG + rollout.indexer_replay=true", "and this model has no indexers: leave it out"),
    ("tower: HALF + train.export_quantization=int8", "_quantization int8 is not supported for"),
    ("tower: HALF + rollout.quantization=int8", "rollout.quantization is int8, and model.path"),
    (
        "cache scales: HALF + rollout.vllm.kv_cache_dtype=fp8_e4m3",
        "model.path has calibrated scales of keys and values (model.layers.0.self_attn.k_proj.k_",
    ),
    ("windows: train.seed=1", "1 have a window of attention; engines serve it only with"),
    ("no windows: SGLANG", "rollout.engine sglang is not supported for the qwen3"),
    ("sparse: HALF + model.megatron.fp8=hybrid", "fp8 hybrid is not supported for a model with"),
    ("mamba: rollout.weight_transport=disk", "transport disk is not supported for a"),
    ("mamba: rollout.router_replay=true", "router_replay true is not supported for a nemo"),
    ("mamba: DRAFTS", "speculative_config is not supported for a nemotron_h"),
]
SHORT = {"EPOCHS": IN_EPOCHS, "SGLANG": SGLANG, "HALF": (HALF,), "DRAFTS": (DRAFTS,)}


@pytest.mark.parametrize(("words", "parts"), [(row[0], row[1:]) for row in REFUSED])
def test_preflight_refuses_in_seconds_with_the_numbers(words, parts, config, on_gpus):
    model = words.partition(": ")[0]
    model = model if model in MODELS else "dense"
    given = words.removeprefix(f"{model}: ").split(" + ")
    message = refusal(
        config(*(key for word in given for key in SHORT.get(word, (word,))), model=model)
    )
    assert [part for part in parts if part not in message] == []


def test_preflight_passes_other_models_on_gpus(config, on_gpus):
    preflight(config("parallel.expert_parallel_size=2", model="mixture"), None)
    preflight(config(HALF, model="sparse"), None)


def test_preflight_refuses_a_run_directory_that_cannot_be_made(config):
    with pytest.raises(ValueError, match=r"train\.run_dir: the folder /proc/x/logs cannot be made"):
        preflight(config("train.run_dir=/proc/x"), None, starts_here=False)


def test_preflight_makes_steps_of_epochs(config):
    cfg, sample, _ = preflight(config(*IN_EPOCHS), None)
    assert (cfg.num_steps, cfg.train.num_epochs) == (30, None)
    assert sample.startswith("30 optimizer steps; row 0 ")


def test_check_attention_of_sglang_knows_windows(tmp_path):
    check_attention("sglang", read_shape(tiny_model(tmp_path / "sinks", "gpt_oss")))
    check_attention("sglang", read_shape(tiny_model(tmp_path / "gemma", "gemma3_text", tied=True)))
    apart = read_shape(tiny_model(tmp_path / "apart", "gemma3_text"))
    olmo = read_shape(tiny_model(tmp_path / "olmo", "olmo3"))
    for shape, reason in (
        (apart, "takes its embedding for the head, and they are not tied"),
        (olmo, "one base of RoPE for layers with windows and without"),
    ):
        assert reason in refusal_of(check_attention, "sglang", shape)
    check_attention("sglang", replace(olmo, window_rope_theta=olmo.rope_theta))


def test_check_attention_names_the_engine_that_computes_a_model(tmp_path):
    biased = read_shape(tiny_model(tmp_path / "biased", "qwen3", attention_bias=True))
    mixed = read_shape(tiny_model(tmp_path / "mixed", "qwen3_moe", mlp_only_layers=[1]))
    for engine, other, shape, reason in (
        ("vllm", "sglang", biased, "vLLM drops the bias of attention's output projection of the q"),
        ("sglang", "vllm", mixed, "as SGLang has experts in all of its layers: use vllm"),
    ):
        assert reason in refusal_of(check_attention, engine, shape)
        check_attention(other, shape)


def test_engines_of_longrope_keep_to_the_trained_length(config, tmp_path):
    shape = read_shape(write_config(tmp_path / "model", "Phi-4-mini"))
    check_served(config("rollout.vllm.max_model_len=4096").rollout, shape)
    longer = config("rollout.vllm.max_model_len=8k").rollout
    reason = "rollout.vllm.max_model_len 8000: in an engine of more than 4096 tokens vLLM rotates"
    assert reason in refusal_of(check_served, longer, shape)


def test_check_attention_knows_linear_attention(config, on_gpus, tmp_path):
    shape = read_shape(tiny_model(tmp_path, "qwen3_next"))
    for engine in ("vllm", "sglang"):
        check_attention(engine, shape)
    reason = "as SGLang has full attention in one layer of so many"
    assert reason in refusal_of(check_attention, "sglang", replace(shape, linear_layers=(1,)))
    check_kernels(config(*SGLANG).rollout, shape, "bfloat16")


def test_check_attention_knows_indexers(config, tmp_path):
    shape = read_shape(tiny_model(tmp_path / "sparse", "glm_moe_dsa"))
    few = read_shape(servable_model(tmp_path / "served", "glm_moe_dsa"))
    for each, field in ((shape, "head_dim 128, and it is 12"), (few, "topk 2048, and it is 5")):
        assert f"indexers with index_{field}: use" in refusal_of(check_attention, "sglang", each)
    served = replace(few, indexer=replace(few.indexer, topk=2048))
    rollout = config(*SGLANG).rollout
    check_served(rollout, served)
    for argument in ("decode_attention_backend", "enable_deterministic_inference"):
        given = rollout.model_copy(update={"sglang": {argument: "fa3"}})
        reason = f"{argument} fa3 is not supported for the sparse"
        assert reason in refusal_of(check_served, given, served)
        check_served(given, replace(served, indexer=None))
    reason = "fp8 is not supported for glm_moe_dsa, which has sparse"
    assert reason in refusal_of(quantized_model, "fp8", shape, "BF16")
    drafts = refusal_of(check_drafts, config(DRAFTS), shape)
    assert "speculative_config " in drafts and " sparse attention: leave" in drafts


@pytest.mark.parametrize(
    ("engine", "dtype", "capability", "reason"),
    [
        ("vllm", "bfloat16", (9, 0), ""),
        ("sglang", "float32", (9, 0), "not in float32 on 9.0: set model.dtype=bfloat16"),
        ("vllm", "bfloat16", (8, 9), "capability 9.0 or more, not in bfloat16 on 8.9"),
    ],
)
def test_check_kernels_has_sparse_attention_from_hopper_on(
    config, path_of, on_gpus, engine, dtype, capability, reason
):
    rollout = config(f"rollout.engine={engine}", "rollout.vllm={}").rollout
    on_gpus(*capability)
    found = refusal_of(check_kernels, rollout, read_shape(path_of("sparse")), dtype)
    assert reason in found and bool(reason) == bool(found)


def test_check_kernels_has_8_bit_weights_of_sglang_from_8_9_on(config, model, tmp_path, on_gpus):
    folder = quantized_copy(model, tmp_path / "quantized", FORMATS["DeepSeek"])
    cfg = config(f"model.path={folder}", *SGLANG)
    rollout = cfg.rollout.model_copy(update={"quantization": "fp8"})
    on_gpus(8, 9)
    check_kernels(rollout, read_shape(folder), "bfloat16")
    on_gpus(8, 0)
    reason = "capability 8.9 or more, not 8.0, for which SGLang"
    assert reason in refusal_of(check_kernels, rollout, read_shape(folder), "bfloat16")


@pytest.mark.skipif(torch.cuda.is_available(), reason="engines would run on GPUs")
def test_check_kernels_refuses_what_engines_on_cpus_cannot_do(config, tmp_path, monkeypatch):
    error = "without a GPU serves dense models alone, without quantisation, and not experts (a nemo"
    assert error in refusal(config(model="mamba"))
    other_heads = tiny_model(tmp_path / "model", "qwen3", head_dim=48)
    message = refusal(config(f"model.path={other_heads}"))
    assert "heads of size 32, 64, 80," in message and "not 48" in message
    for engine in ("vllm", "sglang"):
        rollout = config(f"rollout.engine={engine}", "rollout.vllm={}").rollout
        elsewhere = rollout.model_copy(update={"base_urls": ("http://127.0.0.1:1",)})
        for family, kind in {"qwen3_moe": "experts", "qwen3_5_text": "linear attention"}.items():
            shape = read_shape(servable_model(tmp_path / f"{engine}_{family}", family))
            error = refusal_of(check_kernels, rollout, shape, "bfloat16")
            assert f"{engine} without a GPU serves dense " in error
            assert f"not {kind} (a {family}), of which" in error
            check_kernels(elsewhere, shape, "bfloat16")
    quantized = config("rollout.quantization=int8", HALF)
    assert "and not rollout.quantization int8, of which" in refusal(quantized)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": False})
    assert "needs AVX2" in refusal(config())


def test_check_card_of_vllm_knows_routers_with_mamba(config, path_of):
    shape, rollout = read_shape(path_of("mamba")), config().rollout
    for dtype, capability in (("bfloat16", (9, 0)), ("bfloat16", (10, 3)), ("float32", (8, 0))):
        check_card(rollout, shape, dtype, capability)
    check_card(rollout, replace(shape, moe=None), "bfloat16", (8, 9))
    for capability in ((8, 9), (12, 0)):
        error = refusal_of(check_card, rollout, shape, "bfloat16", capability)
        assert "in float32 on GPUs " in error and " bfloat16: use GPUs of 9.0 or" in error


def test_check_served_refuses_groups_of_families_that_were_not_tried(config):
    rollout = config(*SGLANG, "rollout.data_parallel_size=2").rollout
    reason = "sglang is not supported for a mixtral: set it to 1, or"
    assert reason in refusal_of(check_served, rollout, MIXTRAL_8X7B)
    check_served(rollout, QWEN3_30B)
    check_served(rollout.model_copy(update={"data_parallel_size": 1}), MIXTRAL_8X7B)
    whole = rollout.model_copy(update={"sglang": {"ep_size": 2}})
    stacked = replace(QWEN3_30B, moe=replace(QWEN3_30B.moe, stacks="alternating"))
    reason = "ep_size 2: SGLang cannot load whole experts of a"
    assert reason in refusal_of(check_served, whole, stacked)


def test_check_lora_refuses_a_nemotron_h(path_of):
    reason = "lora.r 2 is not supported for a nemotron_h"
    assert reason in refusal_of(check_lora, LoraConfig(r=2), read_shape(path_of("mamba")), 1)


EXAMINED = """
import os, sys
from pathlib import Path
from megatron_grpo.config.file import load_config
from megatron_grpo.preflight import preflight
for file in map(Path, sys.argv[1:]):
    preflight(load_config(file), None)
    print(f"passed: {file.stem}", file=sys.stderr)
print([name for name in ("megatron.core", "wandb") if name in sys.modules])
sys.stdout.flush()
os._exit(0)  # as by exec, when the ranks start: nothing is tidied at exit
"""
# A CPU without units for bfloat16, whatever this one has.
EMULATES_BFLOAT16 = {"ONEDNN_MAX_CPU_ISA": "AVX2"}
SLOW_BFLOAT16 = "many times as long as with model.dtype=float32"


@pytest.mark.long
def test_preflight_loads_no_wandb_leaves_no_files_and_warns_of_slow_bfloat16(config, tmp_path):
    files = [tmp_path / f"{dtype}.yaml" for dtype in ("float32", "bfloat16")]
    for file in files:
        file.write_text(dump_config(config(f"model.dtype={file.stem}")))
    leftovers = tmp_path / "tmp"
    leftovers.mkdir()
    examined = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", EXAMINED, *files],
        env=os.environ | EMULATES_BFLOAT16 | {"TMPDIR": str(leftovers)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert examined.returncode == 0, examined.stderr
    assert examined.stdout.splitlines()[-1] == "['megatron.core']"
    assert list(leftovers.iterdir()) == []
    in_float32, in_bfloat16 = examined.stderr.split("passed: float32\n")
    assert SLOW_BFLOAT16 not in in_float32
    assert (SLOW_BFLOAT16 in in_bfloat16) is not torch.cuda.is_available()  # GPUs multiply it


BROKEN_REWARDS = """
def number(completions, **_): return 1.0
def text(completions, **_): return ["good"] * len(completions)
def first(completions, **_): return [1.0]
def solution(completions, **row): return [row["solution"] for _ in completions]
"""


def test_preflight_calls_the_rewards(config, tmp_path, capfd):
    file = tmp_path / "mine.py"
    file.write_text(BROKEN_REWARDS)
    for name, reason in {
        "number": "returned float instead of a list, for 3 completions",
        "text": "returned the score 'good': each must be a number",
        "first": "returned 1 score for 3 completions",
    }.items():
        message = refusal(config(f"reward.functions=[{{name: '{file}:{name}'}}]"))
        assert f"reward function {name} on prompt 0 (" in message and reason in message
    capfd.readouterr()
    # A reward may fail on a completion that is made up.
    checked = preflight(config(f"reward.functions=[{{name: '{file}:solution'}}]"), None)
    output = capfd.readouterr().err
    assert "KeyError: 'solution'" in output and "made-up completions" in output
    assert "solution nan: 'The answer is 42.'" in repr(checked)
    assert "3 of 3 trial completions have NO SCORE" in repr(checked)
    right = preflight(config("reward.functions=[exact]"), None)
    assert "\n  exact 1: '0' (the answer)\n  exact 0: 'The answer is 42.'\n" in repr(right)
    assert repr(right).endswith("; rewards were tried")
    file.write_text("def never(completions, **_): return [0.0] * len(completions)")
    never = preflight(config(f"reward.functions=[{{name: '{file}:never'}}]"), None)
    assert repr(never).endswith("'0' scores 0: does the reward know the right answer?")


def test_preflight_lists_answers_that_the_reward_cannot_read(config, tmp_path):
    rows = [{"prompt": f"question {i}", "answer": "####" if i % 4 == 1 else "1"} for i in range(20)]
    data = write_rows(tmp_path / "unread.jsonl", rows)
    mathematics = f"data.path={data}", "reward.functions=[math_answer]"
    error = f"{data} line 2: no answer that math_answer can read: '####'"
    assert error in refusal(config(*mathematics))
    preflight(config(*mathematics, "data.on_invalid=skip"), None)
    preflight(config(f"data.path={data}"), None)
    assert error in refusal(config("eval.reward.functions=[math_answer]", f"eval.data.path={data}"))


@pytest.mark.parametrize("setting", ["NCCL_CUMEM_ENABLE=0", "NCCL_DISABLE_MEM_MANAGER=1"])
def test_preflight_refuses_an_nccl_that_gives_no_memory_back(config, setting, monkeypatch):
    monkeypatch.setenv(*setting.split("="))
    options = ["rollout.enable_sleep_mode=true", "train.offload=all"]
    preflight(config(*options), TOKEN)
    refused = refusal(config(*options, "train.offload_communicators=true"))
    assert f"with {setting}" in refused and "train.offload_communicators=false" in refused


@pytest.mark.parametrize(
    ("setting", "package", "install"),
    [
        ("train.tensorboard=true", "tensorboard", "pip install -e '.[tensorboard]'"),
        ("trackio.project=adds", "trackio", "pip install trackio"),
    ],
)
def test_preflight_names_the_command_that_installs_a_tracker(
    setting, package, install, config, monkeypatch
):
    monkeypatch.setitem(sys.modules, package, None)  # as if it could not be found
    key = setting.partition("=")[0]
    assert refusal(config(setting)) == f"{key} needs {package}: `{install}`, or leave it out"


# Folders of models


def without_a_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors")


def without_a_tokenizer(folder: Path) -> None:
    """Remove the tokenizer: transformers would make one without words out of nothing."""
    for file in folder.glob("*tokenizer*"):
        file.unlink()


def with_a_link(folder: Path) -> None:
    (folder / "tokenizer.json").rename(folder.parent / "moved.json")
    (folder / "tokenizer.json").symlink_to(folder.parent / "moved.json")


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (rmtree, "copy is not a folder"),
        (lambda folder: (folder / "config.json").unlink(), "config.json does not exist"),
        (without_a_weight, "model.layers.1.mlp.up_proj.weight [96, 64] is missing"),
        (without_a_tokenizer, "has no tokenizer: none of tokenizer.json"),
        (with_a_link, "replace it with a copy"),
    ],
    ids=["no folder", "no config", "no weight", "no tokenizer", "a link"],
)
def test_preflight_refuses_a_model_that_is_not_whole(damage, error, config, model, tmp_path):
    damage(folder := copytree(model, tmp_path / "copy"))
    assert error in refusal(config(f"model.path={folder}"))


def test_preflight_refuses_an_adapter_that_is_not_finite(config, model, tmp_path):
    shape = read_shape(model)
    modules = [f"model.layers.{i}.self_attn.q_proj" for i in range(shape.num_layers)]
    tensors = adapter_tensors(modules, 2, hf_tensors(shape))
    values = {name: torch.ones(size) for name, size in tensors.items()}
    (folder := tmp_path / "adapter").mkdir()
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    targets = "lora.r=2", "lora.lora_alpha=4", "lora.target_modules=[q_proj]"
    cfg = config(f"lora.adapter_path={folder}", *targets)
    save_file(values, folder / "adapter_model.safetensors")
    preflight(cfg, TOKEN)
    values[b_name(modules[1])][3, 1] = torch.inf
    save_file(values, folder / "adapter_model.safetensors")
    error = f"{b_name(modules[1])} has values that are not finite (infinite), in {folder}"
    assert error in refusal(cfg)


def test_preflight_refuses_the_tokenizer_of_another_model(config, model, tmp_path):
    broken = copytree(model, tmp_path / "broken")
    character_tokenizer(400).save_pretrained(broken)
    data = write_rows(tmp_path / "rare.jsonl", [{"prompt": "\u01ab", "answer": ""}])
    few = f"data.path={data}", "grpo.generation_batch_size=4"
    message = refusal(config(f"model.path={broken}", *few))
    assert "prompt 0 has the token id 366, and the model's vocabulary ends at 249" in message


def test_preflight_refuses_a_model_that_exports_would_replace(config, model, tmp_path):
    (tmp_path / "run").mkdir()
    folder, linked = copytree(model, tmp_path / "run" / "hf_step_10"), tmp_path / "linked"
    linked.symlink_to(folder)
    for path in (folder, linked):
        message = refusal(config(f"model.path={path}"))
        assert f"model.path {path} would be overwritten by what the run exports to" in message
    preflight(config(f"model.path={linked}", f"train.run_dir={tmp_path / 'another'}"), None)


@pytest.mark.long
def test_preflight_refuses_a_chat_that_cannot_be_continued(config, model, tmp_path):
    folder = copytree(model, tmp_path / "model")
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("<eos>", ""))
    name = f"environment.name={write_environments(tmp_path)}:Echo"
    preflight(config(f"model.path={folder}"), None)
    assert "does not close the model's turn" in refusal(config(name, f"model.path={folder}"))


@pytest.mark.long
def test_preflight_refuses_turns_that_end_with_another_token(config, model, tmp_path):
    folder = copytree(model, tmp_path / "base")
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("<eos>", "<start>"))
    path = f"model.path={folder}"
    error = "turn with the token <start> (3), and a completion ends with <eos> (1), so it would not"
    assert error in (refused := refusal(config(path)))
    assert "set rollout.stop_token_ids=[3], or data.apply_chat_template=false" in refused
    held_out = ("data.apply_chat_template=false", "eval.data.apply_chat_template=true")
    assert refusal(config(path, *held_out)).startswith("eval: the chat template ends")
    assert "rollout.stop_token_ids=[7, 3]" in refusal(config(path, "rollout.stop_token_ids=[7]"))
    preflight(config(path, "rollout.stop_token_ids=[3]"), None)
    preflight(config(path, "data.apply_chat_template=false"), None)
    template.write_text(template.read_text().replace("}}<start>", "}}<start><eos>"))
    preflight(config(path), None)


# Engines that are given by address


@contextmanager
def answering(statuses: dict[str, int]) -> Iterator[str]:
    """The address of a server that answers GET requests with these statuses, by route."""

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            has_token = self.headers.get("Authorization") == f"Bearer {TOKEN}"
            is_open = self.path == "/health" or has_token
            self.send_response(statuses.get(self.path, 404) if is_open else 401)
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


SERVES = {"/health": 200, "/load": 200}


@pytest.mark.parametrize(
    ("statuses", "token", "kind", "parts"),
    [
        ({}, None, ValueError, ["MEGATRON_GRPO_TOKEN is not set", "openssl rand -hex 32"]),
        ({"/health": 503}, TOKEN, ConnectionError, ["is not healthy", "503"]),  # it may recover
        ({"/health": 200}, TOKEN, ValueError, ["is not healthy", "404"]),  # it is no engine
        (SERVES, "another-jobs-token", ValueError, ["refuses the token in MEGATRON_GRPO_TOKEN"]),
    ],
)
def test_preflight_names_an_engine_that_does_not_serve_it(statuses, token, kind, parts, config):
    with answering(statuses) as url:
        message = refusal(config(f"rollout.base_urls=[{url}]"), token, kind)
    assert all(part in message for part in parts)
    assert (url in message) == (token is not None)
    assert "another-jobs-token" not in message


def test_preflight_asks_engines(config):
    with answering(SERVES) as url:
        preflight(config(f"rollout.base_urls=[{url}/]"), TOKEN)
    message = refusal(config("rollout.base_urls=[http://127.0.0.1:9]"), kind=ConnectionError)
    assert "rollout engine http://127.0.0.1:9 is not healthy" in message


# Environments, agents and sources


def test_preflight_takes_an_environment_for_the_reward(config, tmp_path):
    mine = f"environment.name={write_environments(tmp_path)}:Echo"
    cfg = config(mine, "reward.functions=[]")
    assert "trained: " not in preflight(cfg, None).prompt
    assert "\n  trained: " in preflight(cfg, None, starts_here=False).prompt  # as `check` does


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("nowhere.py:Echo", "file of an environment nowhere.py does not exist"),
        ("MINE:Rigid", "missing a required argument: 'size'"),
        ("MINE:Curious", "requires 'colour': 20 of 20 rows have no such column"),
        ("MINE:Halved", "has no method step"),
    ],
)
def test_preflight_refuses_an_environment(config, tmp_path, name, error):
    name = name.replace("MINE", str(write_environments(tmp_path)))
    assert error in refusal(config(f"environment.name={name}"))


def test_preflight_starts_an_agent(config):
    agent = ["data.max_prompt_length=40", "agent.command=python nowhere.py"]
    message = refusal(config(*agent, "rollout.max_completion_length=20"))
    assert message.startswith("agent.command python nowhere.py cannot act on row 0: ")
    assert "nowhere.py': [Errno 2]" in message


@pytest.mark.long
def test_preflight_checks_each_source_with_its_own_rows(config, tmp_path):
    mine = write_environments(tmp_path)
    rows = [{"prompt": f"{i}", "answer": "1", "kind": "ab"[i % 2]} for i in range(20)]
    rows = [row | ({"size": 1} if row["kind"] == "a" else {}) for row in rows]
    data, exact = write_rows(tmp_path / "kinds.jsonl", rows), "{reward: {functions: [exact]}}"
    sources = [f"data.path={data}", "sources.column=kind", f"sources.by_name.b={exact}"]
    _, message, _ = preflight(
        config(*sources, f"sources.by_name.a.environment.name={mine}:Echo"), None
    )
    assert "optimizer steps on rows of b, a" in message
    curious = f"sources.by_name.a.environment.name={mine}:Curious"
    message = refusal(config(*sources, curious))
    assert "requires 'colour': 10 of 10 rows have no such column" in message
    message = refusal(config(*sources, f"sources.by_name.a={exact}", f"sources.by_name.c={exact}"))
    assert (
        "sources.by_name.c: no row of data.path has this value in the column kind, only a, b"
        in message
    )
    assert "kind not in sources.by_name (b): 'a'" in refusal(config(*sources))


# Runs that go on, or start from others


def started_run(run_dir: Path, cfg: Config) -> Path:
    """The checkpoint of a new run, with the files that preflight reads."""
    checkpoint = run_dir / "checkpoints" / "step_1"
    (checkpoint / "hf_config").mkdir(parents=True)
    (checkpoint.parent / "LATEST").write_text("step_1\n")
    for name in ("config.json", "generation_config.json"):
        copyfile(cfg.model.path / name, checkpoint / "hf_config" / name)
    for folder in (run_dir, checkpoint):
        (folder / "config.yaml").write_text(dump_config(cfg))
    return checkpoint


def finish(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").write_text('{"files": {}}')


def make_another_model(config_json: Path) -> None:
    of_another = json.loads(config_json.read_text())
    of_another["rope_parameters"]["rope_theta"] = 5e5
    config_json.write_text(json.dumps(of_another))


FASTER = (
    "model.megatron={recompute_granularity: full, recompute_method: uniform, "
    "recompute_num_layers: 1, attention_backend: flash}"
)


@pytest.mark.parametrize(
    "changes",
    [
        ["train.num_steps=9", "parallel.tensor_parallel_size=1", "wandb.project=x"],
        ["train.export_quantization=int8"],
        [FASTER],
        ["train.init_from=gone", "train.num_steps=9"],
    ],
    ids=[
        "longer, on another mesh",
        "another export",
        "speed and memory",
        "without what it started from",
    ],
)
def test_check_same_run_allows_what_is_not_learnt(changes, config, tmp_path):
    started_run(tmp_path / "run", config(*[each for each in changes if "init_from" in each]))
    check_same_run(config(*changes))
    if changes != [FASTER]:  # this host may lack its attention
        preflight(config(*changes), None)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ("grpo.beta=0.1", "grpo.beta: 0.04 before, 0.1 now"),
        ("model.megatron.moe_aux_loss_coeff=0.1", "moe_aux_loss_coeff: not set before, 0.1 now"),
        ("data.chat_template_kwargs.thinking=false", "thinking: not set before, False now"),
        ("train.init_from=other", "train.init_from: "),
    ],
)
def test_check_same_run_refuses_key_by_key(change, error, config, tmp_path):
    started_run(tmp_path / "run", config())
    refused = refusal_of(check_same_run, config(change, "optimizer.lr=1e-4", "train.num_steps=9"))
    assert error in refused and "optimizer.lr: 0.001 before, 0.0001 now" in refused
    assert "num_steps" not in refused
    assert f"another train.run_dir with train.init_from={tmp_path / 'run'}" in refused
    rmtree(tmp_path / "run" / "checkpoints")
    check_same_run(config(change))


def test_check_same_run_keeps_the_format_for_which_a_run_trains(config, tmp_path):
    nvfp4, int8 = (f"train.export_quantization={name}" for name in ("nvfp4", "int8"))
    started_run(tmp_path / "run", config(nvfp4, AWARE))
    reason = "export_quantization: nvfp4 before, int8 now"
    assert reason in refusal_of(check_same_run, config(int8, AWARE))


def test_check_same_run_lets_a_date_be_left_out_or_given(config, tmp_path):
    date = "data.date=2024-05-06"
    started_run(tmp_path / "old", config())
    check_same_run(config(date, f"train.run_dir={tmp_path / 'old'}"))
    started_run(tmp_path / "run", config(date))
    check_same_run(config())
    reason = "data.date: 2024-05-06 before, 2024-05-07 now"
    assert reason in refusal_of(check_same_run, config("data.date=2024-05-07"))


def test_a_run_goes_on_with_the_loss_that_it_began_with(config, tmp_path):
    file, run = tmp_path / "mine.py", tmp_path / "run"
    file.write_text("def mine(ratio, advantages): return -ratio * advantages\n")
    loss = f"grpo.loss_type={file}:mine"
    cfg = preflight(config(loss), None).cfg
    started_run(run, cfg)
    preflight(config(loss), None)
    file.write_text("def mine(ratio, advantages): return -ratio.log() * advantages\n")
    of_file = f"grpo.file_sha256.{file}: "
    assert of_file in refusal(config(loss))
    saved = load_config(run / "config.yaml", [f"train.run_dir={tmp_path / 'again'}"])
    assert f"{file} has changed: its hash is" in refusal(saved)


def test_preflight_refuses_a_key_that_a_users_loss_does_not_take(config, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def mine(ratio, advantages): return -ratio * advantages\n")
    loss = f"grpo.loss_type={file}:mine"
    assert "grpo.epsilon=0.1 does nothing" in refusal(config(loss, "grpo.epsilon=0.1"))


@pytest.mark.parametrize(
    ("advantages", "error"),
    [
        ("(rewards - rewards[group_ids == 1].mean()) / rewards[group_ids == 1].std()", "-inf in a"),
        ("rewards - rewards.mean()", "returns nan in a group with the rewards"),
        ("rewards[level]", "requires 'level': 20 of 20 rows have no such column"),
    ],
    ids=["equal rewards", "a failed score", "no such column"],
)
def test_preflight_refuses_advantages_that_would_stop_the_run(advantages, error, config, tmp_path):
    file = tmp_path / "mine.py"
    takes = "rewards, group_ids, level" if "level" in advantages else "group_ids, rewards"
    file.write_text(f"def mine({takes}): return {advantages}\n")
    assert error in refusal(config(f"grpo.advantage_estimator={file}:mine", "grpo.beta=0"))


def test_check_same_run_keeps_records_whose_checkpoints_are_gone(config, tmp_path):
    run = tmp_path / "run"
    started_run(run, config("train.save_interval=5"))
    records = [f'{{"step": {step}}}\n' for step in range(12)]
    (run / "metrics.jsonl").write_text("".join(records))
    again = config("train.save_interval=1")
    check_same_run(again)
    rmtree(run / "checkpoints")
    with pytest.raises(ValueError, match=r"run holds the records of 11 steps.* every 5 .*gone"):
        check_same_run(again)
    # A run that died in its tenth step may not have finished its first checkpoint.
    (run / "metrics.jsonl").write_text("".join(records[:11]) + '{"step": 11')
    check_same_run(again)


def test_check_same_run_allows_a_model_and_data_that_have_moved(config, model, tmp_path):
    started_run(tmp_path / "run", config())
    moved = copytree(model, tmp_path / "moved")
    paths = f"model.path={moved}", f"data.path={tmp_path / 'rows.jsonl'}.moved"
    check_same_run(config(*paths))
    make_another_model(moved / "config.json")
    error = r"moved is another model than .*step_1/hf_config.*\n.* 10000.0, 500000.0"
    with pytest.raises(ValueError, match=error):
        check_same_run(config(*paths))


def test_check_same_run_names_the_file_of_the_run_itself(config, tmp_path):
    started_run(tmp_path / "run", config())
    saved = tmp_path / "run" / "config.yaml"
    saved.write_text(saved.read_text().replace("kl_horizon: 10000", "kl_horizon: 0"))
    reason = "run/config.yaml: config key grpo.kl_horizon = 0"
    assert reason in refusal_of(check_same_run, config())


def test_check_same_run_allows_an_earlier_versions_missing_keys(config, tmp_path):
    started_run(tmp_path / "run", config())
    saved = yaml.safe_load(dump_config(config()))
    del saved["environment"]
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(saved))
    check_same_run(config())
    mine = f"environment.name={write_environments(tmp_path)}:Echo"
    with pytest.raises(ValueError, match=r"environment.name: None before, .*mine.py:Echo now"):
        check_same_run(config(mine))


def test_check_same_run_allows_another_timeout_of_a_source(config, tmp_path):
    sources = ["sources.column=kind", "sources.by_name={a.b/c: {reward: {functions: [exact]}}}"]
    started_run(tmp_path / "run", config(*sources))
    own = "sources.by_name={a.b/c: {reward: {functions: [OTHER], timeout: 5}}}"
    check_same_run(config(sources[0], own.replace("OTHER", "exact")))
    with pytest.raises(ValueError, match=r"reward.functions.*: .*exact.*before"):
        check_same_run(config(sources[0], own.replace("OTHER", "math_answer")))


def test_check_start_needs_a_checkpoint_of_the_same_model(config, tmp_path):
    other = tmp_path / "other"
    message = refusal(config(f"train.init_from={other}"))
    assert f"train.init_from {other} has no checkpoint: give the run_dir" in message
    checkpoint = started_run(other, config(f"train.run_dir={other}"))
    message = refusal(config(f"train.init_from={checkpoint}"))
    assert f"{checkpoint} cannot be used: it has no manifest.json" in message
    assert message.endswith("the only one of its run, or leave it out to start from model.path")
    finish(checkpoint)
    for start in (other, checkpoint):
        preflight(config(f"train.init_from={start}", "grpo.beta=0.1", "optimizer.lr=0.1"), None)
    make_another_model(checkpoint / "hf_config" / "config.json")
    assert "is another model than" in refusal(config(f"train.init_from={other}"))


EXPORT = r"run_dir with model.path=<export of that run>\n"


@pytest.mark.parametrize("before", [0, 1])
def test_check_start_needs_a_run_that_trains_the_same_layers(config, tmp_path, before):
    model = add_mtp_layer(tiny_model(tmp_path / "glm", "glm4_moe"))
    numbers = [f"model.mtp_num_layers={number}" for number in (before, 1 - before)]
    other, now = (config(f"model.path={model}", number) for number in numbers)
    checkpoint = started_run(tmp_path / "run", other)
    with pytest.raises(ValueError, match=EXPORT):
        check_same_run(now)
    finish(checkpoint)
    new = f"train.run_dir={tmp_path / 'new'}", f"train.init_from={tmp_path / 'run'}"
    check_start(config(*new, f"model.path={model}", numbers[0]))
    moved = add_mtp_layer(tiny_model(tmp_path / "moved", "glm4_moe"))
    check_same_run(config(f"model.path={moved}", numbers[0]))
    reason = (
        f"{numbers[0]}: set that, or replace train.init_from by model.path=<export of that run>"
    )
    assert reason in refusal_of(check_start, config(*new, f"model.path={model}", numbers[1]))


def test_check_start_needs_the_state_of_the_same_optimizer(config, tmp_path):
    muon = "optimizer.optimizer=muon"
    checkpoint = started_run(tmp_path / "run", config())
    with pytest.raises(ValueError, match=EXPORT):
        check_same_run(config(muon))
    finish(checkpoint)
    new = f"train.run_dir={tmp_path / 'new'}", f"train.init_from={tmp_path / 'run'}"
    saved = checkpoint / "config.yaml"
    saved.write_text("optimizer: {key_of_old: 1}\n")  # from before there were two optimizers
    check_start(config(*new))
    reason = "is of a run with optimizer.optimizer=adam: set that"
    assert reason in refusal_of(check_start, config(*new, muon))
    saved.write_text("optimizer: {optimizer: muon}\n")
    check_start(config(*new, muon))


@pytest.mark.parametrize(
    ("before", "now", "start"),
    [
        (["lora.r=4"], ["lora.r=4"], "lora.adapter_path=<export of that run>"),
        (["lora.r=4"], ["lora.r=8"], "model.path=<what `checkpoint-convert merge` makes of"),
        (["lora.r=4"], [], "model.path=<what `checkpoint-convert merge` makes of"),
        ([], ["lora.r=4"], "model.path=<export of that run>"),
    ],
)
def test_check_same_run_names_what_adapters_may_start_from(before, now, start, config, tmp_path):
    merged = "lora.sync=merged"
    checkpoint = started_run(tmp_path / "run", config(merged, *before))
    refused = refusal_of(check_same_run, config(merged, "grpo.beta=0.1", *now))
    assert f"run in another train.run_dir with {start}" in refused
    finish(checkpoint)
    if before and not now:
        new = f"train.run_dir={tmp_path / 'new'}", f"train.init_from={tmp_path / 'run'}"
        with pytest.raises(ValueError, match=r"has adapters alone: .* model.path=<what"):
            check_start(config(*new))


# Transformer Engine

ON_A_GPU = """
import sys
from pathlib import Path
import torch
torch.cuda.is_available = lambda: True
from megatron_grpo.config.file import load_config
from megatron_grpo.preflight import preflight
try:
    preflight(load_config(Path(sys.argv[1]), sys.argv[2:]), None)
except ValueError as error:
    print(error)
"""


@pytest.fixture
def refusal_on_a_gpu(config, tmp_path):
    """The message with which a process that believes to have a GPU refuses a bfloat16 run."""
    (tmp_path / "config.yaml").write_text(dump_config(config(HALF)))
    path = os.pathsep.join([str(tmp_path), str(REPOSITORY), os.environ.get("PYTHONPATH", "")])

    def refusal_by(*overrides: str) -> str:
        return subprocess.check_output(
            [sys.executable, "-W", "ignore", "-c", ON_A_GPU, tmp_path / "config.yaml", *overrides],
            env=os.environ | {"PYTHONPATH": path},
            text=True,
        )

    return refusal_by


@pytest.mark.slow
def test_preflight_on_a_gpu_takes_torchs_layers_only_if_configured(refusal_on_a_gpu):
    message = refusal_on_a_gpu()
    assert "Transformer Engine does not work here (No module named 'transformer_engine')" in message
    assert "model.megatron.transformer_impl=local" in message
    assert refusal_on_a_gpu("model.megatron.transformer_impl=local") == ""


@pytest.mark.long
@pytest.mark.parametrize(
    ("pytorch", "reason"),
    [
        ("import onnxscrpt", "No module named 'onnxscrpt'"),
        pytest.param(
            "raise AssertionError('core 2.20.2 beside torch 2.19.0')",
            "core 2.20.2 beside torch",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["a package is missing", "its packages do not fit each other"],
)
def test_preflight_says_why_transformer_engine_fails(refusal_on_a_gpu, tmp_path, pytorch, reason):
    write_transformer_engine(tmp_path, pytorch)
    message = refusal_on_a_gpu()
    assert reason in message and "requirements/gpu.sh" in message
