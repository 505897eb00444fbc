import http.server
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from shutil import copyfile, rmtree

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from checkpoint_convert import hf_tensors, read_shape
from checkpoint_convert.peft import adapter_tensors, b_name
from checkpoint_convert.quantized.model import quantized_model
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


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    return servable_model(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture
def config(model, tmp_path, monkeypatch):
    """configs/tiny_cpu.yaml on a tiny model and 20 rows, with overrides."""
    monkeypatch.chdir(REPOSITORY)  # the config names demo/rewards.py
    rows = [{"prompt": f"question {i}", "answer": str(i)} for i in range(20)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths = [f"model.path={model}", f"data.path={data}", f"train.run_dir={tmp_path / 'run'}"]

    def make(*overrides: str) -> Config:
        return load_config(TINY, [*paths, *overrides])

    return make


TOKEN = "0123456789abcdef"


@pytest.fixture
def on_gpus(monkeypatch):
    """For checks: engines would run on an H100."""
    monkeypatch.setattr(support, "num_gpus", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))


def refusal(cfg: Config, token: str | None = TOKEN, kind: type[Exception] = ValueError) -> str:
    start = time.monotonic()
    with pytest.raises(kind) as refused:
        preflight(cfg, token)
    assert time.monotonic() - start < 10
    return str(refused.value)


def test_a_check_refuses_a_run_directory_that_cannot_be_made(config):
    with pytest.raises(ValueError, match=r"train\.run_dir: the folder /proc/x/logs cannot be made"):
        preflight(config("train.run_dir=/proc/x"), None, starts_here=False)


def copy_of(model: Path, folder: Path) -> Path:
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def test_a_config_that_can_run_passes(config):
    preflight(config(), None)
    preflight(config("rollout.vllm.max_model_len=42"), None)  # 30 of a prompt, 12 of a completion


def test_a_text_tower_is_served_by_vllm_as_it_is(config, tmp_path):
    model = f"model.path={tiny_multimodal(tmp_path / 'towers', 'mistral3')}"
    preflight(config(model), None)
    preflight(config(model, "lora.r=4"), None)
    for override, message in {
        "train.export_quantization=int8": "train.export_quantization is int8",
        "rollout.quantization=int8": "rollout.quantization is int8",
    }.items():
        assert f"{message}, and model.path" in refusal(
            config(model, "model.dtype=bfloat16", override)
        )


@pytest.mark.parametrize(
    ("engine", "first", "message"),
    [
        ("vllm", 1, "1 have a window of attention; engines serve it only with"),
        ("vllm", 0, None),
        ("sglang", 0, "rollout.engine sglang is not supported for the qwen3"),
    ],
)
def test_an_engine_that_would_leave_out_windows_is_refused(
    config, tmp_path, engine, first, message
):
    windows = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": first}
    model = servable_model(tmp_path / "windows", "qwen3", **windows)
    cfg = config(f"model.path={model}", f"rollout.engine={engine}", "rollout.vllm={}")
    if message is None:
        preflight(cfg, None)
    else:
        assert message in refusal(cfg)


def test_sglang_serves_windows_where_its_classes_have_them(tmp_path):
    check_attention("sglang", read_shape(tiny_model(tmp_path / "sinks", "gpt_oss")))
    check_attention("sglang", read_shape(tiny_model(tmp_path / "gemma", "gemma3_text", tied=True)))
    apart = read_shape(tiny_model(tmp_path / "apart", "gemma3_text"))
    with pytest.raises(ValueError, match="takes its embedding for the head, and they are not tied"):
        check_attention("sglang", apart)
    olmo = read_shape(tiny_model(tmp_path / "olmo", "olmo3"))
    with pytest.raises(ValueError, match="one base of RoPE for layers with windows and without"):
        check_attention("sglang", olmo)
    check_attention("sglang", replace(olmo, window_rope_theta=olmo.rope_theta))


def test_linear_attention_is_for_vllm_and_on_gpus_for_sglang(config, monkeypatch, tmp_path):
    shape = read_shape(tiny_model(tmp_path, "qwen3_next"))
    for engine in ("vllm", "sglang"):
        check_attention(engine, shape)
    with pytest.raises(ValueError, match=r"as SGLang has full attention in one layer of so many"):
        check_attention("sglang", replace(shape, linear_layers=(1,)))
    rollout = config("rollout.engine=sglang", "rollout.vllm={}").rollout
    monkeypatch.setattr(support, "num_gpus", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    check_kernels(rollout, shape, "bfloat16")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["rollout.weight_transport=disk"], "rollout.weight_transport disk is not supported for a"),
        (["rollout.router_replay=true"], "rollout.router_replay true is not supported for a nemo"),
        (
            ["rollout.vllm={speculative_config: {method: ngram, num_speculative_tokens: 2}}"],
            "speculative_config is not supported for a nemotron_h",
        ),
        (["parallel.tensor_parallel_size=8"], "does not divide n_groups(4)"),
    ],
    ids=str,
)
def test_what_does_not_go_with_layers_of_mamba_is_refused_by_name(
    tmp_path, config, options, message
):
    model = tiny_model(tmp_path / "mamba", "nemotron_h", num_attention_heads=8)
    assert message in refusal(config(f"model.path={model}", *options))


@pytest.mark.skipif(torch.cuda.is_available(), reason="engines would run on GPUs")
def test_layers_of_mamba_are_for_engines_on_gpus(tmp_path, config):
    model = tiny_model(tmp_path / "mamba", "nemotron_h")
    told = "without a GPU serves dense models alone, without quantisation, and not experts (a nemo"
    assert told in refusal(config(f"model.path={model}"))


def test_vllm_has_routers_beside_mamba_in_float32_on_some_gpus(config, tmp_path):
    shape, rollout = read_shape(tiny_model(tmp_path, "nemotron_h")), config().rollout
    for dtype, capability in (("bfloat16", (9, 0)), ("bfloat16", (10, 3)), ("float32", (8, 0))):
        check_card(rollout, shape, dtype, capability)
    check_card(rollout, replace(shape, moe=None), "bfloat16", (8, 9))
    for capability in ((8, 9), (12, 0)):
        with pytest.raises(
            ValueError, match=r"in float32 on GPUs .* bfloat16: use GPUs of 9\.0 or"
        ):
            check_card(rollout, shape, "bfloat16", capability)


def test_adapters_of_other_names_than_those_of_transformers_are_refused(tmp_path):
    shape = read_shape(tiny_model(tmp_path, "nemotron_h"))
    with pytest.raises(ValueError, match=r"lora\.r 2 is not supported for a nemotron_h"):
        check_lora(LoraConfig(r=2), shape, 1)


def test_what_engines_draft_with_is_checked(config):
    cfg = config("rollout.vllm={speculative_config: '{}'}")
    assert "rollout.vllm.speculative_config is '{}': give a table" in refusal(cfg)


def test_the_number_of_steps_follows_from_the_epochs_when_the_data_is_read(config):
    given = "train.num_steps=null", "train.num_epochs=3", "grpo.num_iterations=2"
    cfg, sample = preflight(config(*given), None)
    assert (cfg.num_steps, cfg.train.num_epochs) == (30, None)
    assert sample.startswith("30 optimizer steps; row 0 ")
    late = config(*given, "optimizer.lr_warmup_steps=30")
    assert "lr_warmup_steps 30 must be below train.num_steps 30" in refusal(late)


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


# Whatever this CPU could do: without units for bfloat16.
EMULATES_BFLOAT16 = {"ONEDNN_MAX_CPU_ISA": "AVX2"}
SLOW_BFLOAT16 = "many times as long as with model.dtype=float32"


@pytest.mark.long
def test_a_preflight_loads_no_wandb_leaves_no_files_and_tells_of_slow_bfloat16(config, tmp_path):
    dtypes = ("float32", "bfloat16")
    files = [tmp_path / f"{dtype}.yaml" for dtype in dtypes]
    for file, dtype in zip(files, dtypes, strict=True):
        file.write_text(dump_config(config(f"model.dtype={dtype}")))
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


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        # Sizes that do not multiply.
        (["grpo.generation_batch_size=50", "grpo.num_generations=8"], ["50", "8", "48 or 56"]),
        (["grpo.steps_per_generation=3"], ["16", "3", "2 or 4"]),
        (["grpo.generation_batch_size=84"], ["needs 21 different prompts", "has 20"]),
        # Parts of the mesh that the model or each other do not allow.
        (["parallel.tensor_parallel_size=3"], ["tensor(3)", "num_attention_heads(4)", "[1, 2, 4]"]),
        (["parallel.expert_parallel_size=2"], ["expert(2)", "qwen3 has none", "set 1"]),
        (["rollout.router_replay=true"], ["needs a mixture of experts", "dense: leave it out"]),
        (["model.freeze_moe_router=true"], ["needs a mixture of experts", "dense: leave it out"]),
        (
            ["rollout.engine=vllm", "rollout.tensor_parallel_size=3"],
            ["tensor_parallel_size(3)", "[1, 2, 4]"],
        ),
        # Weights that do not divide into blocks.
        (["train.export_quantization=fp8"], ["blocks of 128 rows", "k_proj", "use fp8_channel"]),
        (
            ["train.export_quantization=nvfp4", "parallel.tensor_parallel_size=4"],
            ["a rank has [64, 24] of", "down_proj", "use fewer tensor ranks"],
        ),
        # Lengths.
        (
            ["train.max_tokens_per_microbatch=32"],
            ["30 tokens", "length 12", "= 32", "set it to 44"],
        ),
        (
            ["rollout.vllm.max_model_len=41"],
            ["data: a prompt of 30 tokens", "max_completion_length 12", "41: set", "at least 42"],
        ),
        # Upstream options.
        (["model.megatron.recompute_granularit=full"], ["recompute_granularit", "did you mean"]),
        (
            ["rollout.engine=vllm", "rollout.vllm.max_model_length=9"],
            ["did you mean max_model_len"],
        ),
        # Data and rewards.
        (["parallel.tensor_parallel_size=3", "data.path=none.jsonl"], ["tensor(3)"]),
        (
            ["reward.functions=[demo/rewards.py:exct]", "data.max_prompt_length=1"],
            ["demo/rewards.py has no function 'exct'"],
        ),
        (
            [
                "reward.functions=[{name: soft_overlong, "
                "arguments: {soft_max_length: 50, soft_cache_length: 60}}]"
            ],
            ["soft_cache_length 60", "below soft_max_length 50", "such as 10"],
        ),
    ],
)
def test_bad_input_is_refused_in_seconds_with_the_numbers(overrides, parts, config):
    message = refusal(config(*overrides))
    for part in parts:
        assert part in message


BROKEN_REWARDS = """
def number(completions, **_): return 1.0
def text(completions, **_): return ["good"] * len(completions)
def first(completions, **_): return [1.0]
def solution(completions, **row): return [row["solution"] for _ in completions]
"""


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("number", "returned float instead of a list, for 2 completions"),
        ("text", "returned the score 'good': each must be a number"),
        ("first", "returned 1 scores for 2 completions"),
    ],
)
def test_a_reward_that_returns_no_score_per_completion_is_refused(name, told, config, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(BROKEN_REWARDS)
    message = refusal(config(f"reward.functions=[{{name: '{file}:{name}'}}]"))
    assert f"reward function {name} on prompt 0 (" in message and told in message


def test_a_reward_that_fails_on_a_made_up_completion_is_told(config, tmp_path, capfd):
    file = tmp_path / "mine.py"
    file.write_text(BROKEN_REWARDS)
    preflight(config(f"reward.functions=[{{name: '{file}:solution'}}]"), None)
    told = capfd.readouterr().err
    assert "KeyError: 'solution'" in told and "made-up completions" in told


@pytest.fixture(scope="session")
def mixture(tmp_path_factory) -> Path:
    return servable_model(tmp_path_factory.mktemp("mixture"), "qwen3_moe")


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("parallel.sequence_parallel=false", "tensor_parallel_size to 1"),
        ("model.megatron.moe_expert_capacity_factor=1.0", "factor is not possible"),
    ],
)
def test_what_a_mixture_cannot_do_is_refused(override, part, config, mixture, on_gpus):
    path = f"model.path={mixture}"
    preflight(config(path, "parallel.expert_parallel_size=2"), None)
    assert part in refusal(config(path, override))


def test_answers_that_the_reward_cannot_read_are_listed(config, tmp_path):
    rows = [{"prompt": f"question {i}", "answer": "####" if i % 4 == 1 else "1"} for i in range(20)]
    data = tmp_path / "unread.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    mathematics = f"data.path={data}", "reward.functions=[math_answer]"
    told = f"{data} line 2: no answer that math_answer can read: '####'"
    assert told in refusal(config(*mathematics))
    preflight(config(*mathematics, "data.on_invalid=skip"), None)
    preflight(config(f"data.path={data}"), None)
    assert told in refusal(config("eval.reward.functions=[math_answer]", f"eval.data.path={data}"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="engines would run on GPUs")
def test_what_the_kernels_of_an_engine_on_cpus_cannot_do_is_refused(config, tmp_path, monkeypatch):
    other_heads = tiny_model(tmp_path / "model", "qwen3", head_dim=48)
    message = refusal(config(f"model.path={other_heads}"))
    assert "heads of size 32, 64, 80," in message and "not 48" in message
    for engine in ("vllm", "sglang"):
        rollout = config(f"rollout.engine={engine}", "rollout.vllm={}").rollout
        for family, kind in {"qwen3_moe": "experts", "qwen3_5_text": "linear attention"}.items():
            shape = read_shape(servable_model(tmp_path / f"{engine}_{family}", family))
            told = rf"{engine} without a GPU serves dense .* not {kind} \(a {family}\), of which"
            with pytest.raises(ValueError, match=told):
                check_kernels(rollout, shape, "bfloat16")
            elsewhere = {"base_urls": ("http://127.0.0.1:1",)}
            check_kernels(rollout.model_copy(update=elsewhere), shape, "bfloat16")
    quantized = config("rollout.quantization=int8", "model.dtype=bfloat16")
    assert "and not rollout.quantization int8, of which" in refusal(quantized)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": False})
    assert "needs AVX2" in refusal(config())


def test_8_bit_weights_that_engines_of_sglang_would_not_hold_as_pushed_are_refused(
    config, model, tmp_path, monkeypatch
):
    folder = quantized_copy(model, tmp_path / "quantized", FORMATS["DeepSeek"])
    cfg = config(f"model.path={folder}", "rollout.engine=sglang", "rollout.vllm={}")
    rollout = cfg.rollout.model_copy(update={"quantization": "fp8"})
    monkeypatch.setattr(support, "num_gpus", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    check_kernels(rollout, read_shape(folder), "bfloat16")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(ValueError, match=r"capability 8\.9 or more, not 8\.0, for which SGLang"):
        check_kernels(rollout, read_shape(folder), "bfloat16")


SPARSE_REFUSALS = [
    ("grpo.shared_prompts=true", "grpo.shared_prompts true is not supported for a model with"),
    ("model.megatron.fp8=hybrid", "model.megatron.fp8 hybrid is not supported for a model with"),
]
INDEXER_REPLAY = ["rollout.engine=sglang", "rollout.vllm={}", "rollout.indexer_replay=true"]


@pytest.mark.parametrize(("override", "told"), SPARSE_REFUSALS)
def test_what_does_not_go_with_sparse_attention_is_refused(
    config, tmp_path, override, told, on_gpus
):
    folder = servable_model(tmp_path / "sparse", "deepseek_v32")
    common = (f"model.path={folder}", "model.dtype=bfloat16")
    preflight(config(*common), None)
    assert told in refusal(config(*common, override))


def test_indexer_replay_of_a_model_without_indexers_is_refused(config):
    assert "and this model has no indexers: leave it out" in refusal(config(*INDEXER_REPLAY))


@pytest.mark.parametrize("setting", ["NCCL_CUMEM_ENABLE=0", "NCCL_DISABLE_MEM_MANAGER=1"])
def test_an_environment_in_which_nccl_gives_no_memory_back_is_refused(config, setting, monkeypatch):
    monkeypatch.setenv(*setting.split("="))
    options = ["rollout.enable_sleep_mode=true", "train.offload=all"]
    preflight(config(*options), TOKEN)
    refused = refusal(config(*options, "train.offload_communicators=true"))
    assert f"with {setting}" in refused and "train.offload_communicators=false" in refused


def test_groups_of_workers_are_refused_with_sglang_for_families_that_were_not_tried(config):
    groups = "rollout.data_parallel_size=2"
    rollout = config("rollout.engine=sglang", "rollout.vllm={}", groups).rollout
    with pytest.raises(ValueError, match="sglang is not supported for a mixtral: set it to 1, or"):
        check_served(rollout, MIXTRAL_8X7B)
    check_served(rollout, QWEN3_30B)
    check_served(rollout.model_copy(update={"data_parallel_size": 1}), MIXTRAL_8X7B)
    whole = rollout.model_copy(update={"sglang": {"ep_size": 2}})
    stacked = replace(QWEN3_30B, moe=replace(QWEN3_30B.moe, stacks="alternating"))
    with pytest.raises(ValueError, match="ep_size 2: SGLang cannot load whole experts of a"):
        check_served(whole, stacked)


def test_engines_refuse_sparse_attention_by_name(config, tmp_path, monkeypatch):
    shape = read_shape(tiny_model(tmp_path / "sparse", "glm_moe_dsa"))
    with pytest.raises(ValueError, match="indexers with index_head_dim 128, and it is 12: use"):
        check_attention("sglang", shape)
    few = read_shape(servable_model(tmp_path / "served", "glm_moe_dsa"))
    with pytest.raises(ValueError, match="indexers with index_topk 2048, and it is 5: use"):
        check_attention("sglang", few)
    served = replace(few, indexer=replace(few.indexer, topk=2048))
    rollout = config("rollout.engine=sglang", "rollout.vllm={}").rollout
    check_served(rollout, served)
    for argument in ("decode_attention_backend", "enable_deterministic_inference"):
        told = rollout.model_copy(update={"sglang": {argument: "fa3"}})
        with pytest.raises(ValueError, match=rf"{argument} fa3 is not supported for the sparse"):
            check_served(told, served)
        check_served(told, replace(served, indexer=None))
    with pytest.raises(ValueError, match="fp8 is not supported for glm_moe_dsa, which has sparse"):
        quantized_model("fp8", shape, "BF16")
    drafts = "rollout.vllm.speculative_config={method: ngram, num_speculative_tokens: 2}"
    with pytest.raises(ValueError, match=r"speculative_config .* sparse attention: leave"):
        check_drafts(config(drafts), shape)


@pytest.mark.parametrize(
    ("engine", "dtype", "capability", "told"),
    [
        ("vllm", "bfloat16", (9, 0), None),
        ("sglang", "float32", (9, 0), r"not in float32 on 9\.0: set model\.dtype=bfloat16"),
        ("vllm", "bfloat16", (8, 9), r"capability 9\.0 or more, not in bfloat16 on 8\.9"),
    ],
)
def test_engines_serve_sparse_attention_in_bfloat16_from_hopper_on(
    config, tmp_path, monkeypatch, engine, dtype, capability, told
):
    shape = read_shape(tiny_model(tmp_path / "sparse", "deepseek_v32"))
    rollout = config(f"rollout.engine={engine}", "rollout.vllm={}").rollout
    monkeypatch.setattr(support, "num_gpus", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    if told is None:
        check_kernels(rollout, shape, dtype)
        return
    with pytest.raises(ValueError, match=told):
        check_kernels(rollout, shape, dtype)


def without_a_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors")


def without_a_tokenizer(folder: Path) -> None:
    """Else transformers would make one without words out of nothing."""
    for file in folder.glob("*tokenizer*"):
        file.unlink()


def with_a_link(folder: Path) -> None:
    (folder / "tokenizer.json").rename(folder.parent / "moved.json")
    (folder / "tokenizer.json").symlink_to(folder.parent / "moved.json")


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (rmtree, "copy is not a folder"),
        (lambda folder: (folder / "config.json").unlink(), "config.json does not exist"),
        (without_a_weight, "model.layers.1.mlp.up_proj.weight [96, 64] is missing"),
        (without_a_tokenizer, "has no tokenizer: none of tokenizer.json"),
        (with_a_link, "replace it with a copy"),
    ],
    ids=["no folder", "no config", "no weight", "no tokenizer", "a link"],
)
def test_a_model_that_is_not_whole_is_refused(damage, told, config, model, tmp_path):
    folder = copy_of(model, tmp_path / "copy")
    damage(folder)
    assert told in refusal(config(f"model.path={folder}"))


def test_an_adapter_that_is_not_finite_is_refused_before_the_run(config, model, tmp_path):
    shape = read_shape(model)
    modules = [f"model.layers.{i}.self_attn.q_proj" for i in range(shape.num_layers)]
    tensors = adapter_tensors(modules, 2, hf_tensors(shape))
    values = {name: torch.ones(size) for name, size in tensors.items()}
    (folder := tmp_path / "adapter").mkdir()
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    cfg = config(
        f"lora.adapter_path={folder}",
        *("lora.r=2", "lora.lora_alpha=4", "lora.target_modules=[q_proj]"),
    )
    save_file(values, folder / "adapter_model.safetensors")
    preflight(cfg, TOKEN)
    values[b_name(modules[1])][3, 1] = torch.inf
    save_file(values, folder / "adapter_model.safetensors")
    told = f"{b_name(modules[1])} has values that are not finite (infinite), in {folder}"
    assert told in refusal(cfg)


def test_tokenizer_of_another_model_is_refused(config, model, tmp_path):
    broken = copy_of(model, tmp_path / "broken")
    character_tokenizer(400).save_pretrained(broken)
    data = tmp_path / "rare.jsonl"
    data.write_text(json.dumps({"prompt": "\u01ab", "answer": ""}) + "\n")
    message = refusal(
        config(f"model.path={broken}", f"data.path={data}", "grpo.generation_batch_size=4")
    )
    assert "prompt 0 has the token id 366, and the model's vocabulary ends at 249" in message


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


@pytest.mark.parametrize(
    ("statuses", "token", "kind", "parts"),
    [
        ({}, None, ValueError, ["MEGATRON_GRPO_TOKEN is not set", "openssl rand -hex 32"]),
        ({"/health": 503}, TOKEN, ConnectionError, ["is not healthy", "503"]),  # it may recover
        ({"/health": 200}, TOKEN, ValueError, ["is not healthy", "404"]),  # it is no engine
        (
            {"/health": 200, "/load": 200},
            "another-jobs-token",
            ValueError,
            ["refuses the token in MEGATRON_GRPO_TOKEN"],
        ),
    ],
)
def test_an_engine_that_does_not_serve_this_job_is_named(statuses, token, kind, parts, config):
    with answering(statuses) as url:
        message = refusal(config(f"rollout.base_urls=[{url}]"), token, kind)
    assert all(part in message for part in parts)
    assert (url in message) == (token is not None)
    assert "another-jobs-token" not in message


def test_an_engine_that_is_healthy_passes_and_one_that_does_not_answer_is_no_mistake(config):
    with answering({"/health": 200, "/load": 200}) as url:
        preflight(config(f"rollout.base_urls=[{url}/]"), TOKEN)
    message = refusal(config("rollout.base_urls=[http://127.0.0.1:9]"), kind=ConnectionError)
    assert "rollout engine http://127.0.0.1:9 is not healthy" in message


def started_run(run_dir, config):
    """What a run with a first checkpoint leaves, as far as preflight looks."""
    checkpoints = run_dir / "checkpoints"
    (checkpoints / "step_1").mkdir(parents=True)
    (checkpoints / "LATEST").write_text("step_1\n")
    (checkpoints / "step_1" / "hf_config").mkdir()
    for name in ("config.json", "generation_config.json"):
        copyfile(config.model.path / name, checkpoints / "step_1" / "hf_config" / name)
    for folder in (run_dir, checkpoints / "step_1"):
        (folder / "config.yaml").write_text(dump_config(config))


FASTER = (
    "model.megatron={recompute_granularity: full, recompute_method: uniform, "
    "recompute_num_layers: 1, attention_backend: flash}"
)


@pytest.mark.parametrize(
    "changes",
    [
        ["train.num_steps=9", "parallel.tensor_parallel_size=1", "wandb.project=x"],
        [FASTER],
        ["train.init_from=gone", "train.num_steps=9"],
    ],
    ids=["longer, on another mesh", "speed and memory", "without what it started from"],
)
def test_a_run_may_resume_with_what_is_not_learnt(changes, config, tmp_path):
    started_run(tmp_path / "run", config(*[each for each in changes if "init_from" in each]))
    check_same_run(config(*changes))
    if changes != [FASTER]:  # this host may lack its attention
        preflight(config(*changes), None)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("grpo.beta=0.1", "grpo.beta: 0.04 before, 0.1 now"),
        ("model.megatron.moe_aux_loss_coeff=0.1", "moe_aux_loss_coeff: not set before, 0.1 now"),
        (
            "data.chat_template_kwargs.enable_thinking=false",
            "enable_thinking: not set before, False now",
        ),
        ("train.init_from=other", "train.init_from: "),
    ],
)
def test_another_config_is_refused_key_by_key_once_there_is_a_checkpoint(
    change, told, config, tmp_path
):
    started_run(tmp_path / "run", config())
    with pytest.raises(ValueError) as refused:
        check_same_run(config(change, "optimizer.lr=1e-4", "train.num_steps=9"))
    assert told in str(refused.value)
    assert "optimizer.lr: 0.001 before, 0.0001 now" in str(refused.value)
    assert "num_steps" not in str(refused.value)
    assert f"another train.run_dir with train.init_from={tmp_path / 'run'}" in str(refused.value)
    rmtree(tmp_path / "run" / "checkpoints")
    check_same_run(config(change))


def test_the_date_of_a_run_may_be_left_out_or_told_to_one_that_has_none_and_no_more(
    config, tmp_path
):
    date = "data.date=2024-05-06"
    started_run(tmp_path / "old", config())
    check_same_run(config(date, f"train.run_dir={tmp_path / 'old'}"))
    started_run(tmp_path / "run", config(date))
    check_same_run(config())
    with pytest.raises(ValueError, match=r"data\.date: 2024-05-06 before, 2024-05-07 now"):
        check_same_run(config("data.date=2024-05-07"))


def test_records_of_a_run_whose_checkpoints_are_gone_are_not_dropped(config, tmp_path):
    run = tmp_path / "run"
    started_run(run, config("train.save_interval=5"))
    records = [f'{{"step": {step}}}\n' for step in range(12)]
    (run / "metrics.jsonl").write_text("".join(records))
    again = config("train.save_interval=1")
    check_same_run(again)
    rmtree(run / "checkpoints")
    with pytest.raises(ValueError, match=r"run holds the records of 11 steps.* every 5 .*gone"):
        check_same_run(again)
    # The first checkpoint may still have been in the making when a run died in its tenth step.
    (run / "metrics.jsonl").write_text("".join(records[:11]) + '{"step": 11')
    check_same_run(again)


@pytest.mark.parametrize(
    ("setting", "package", "install"),
    [
        ("train.tensorboard=true", "tensorboard", "pip install -e '.[tensorboard]'"),
        ("trackio.project=adds", "trackio", "pip install trackio"),
    ],
)
def test_a_tracker_that_is_not_installed_is_refused_with_the_command_that_installs_it(
    setting, package, install, config, monkeypatch
):
    monkeypatch.setitem(sys.modules, package, None)  # as if it could not be found
    key = setting.partition("=")[0]
    assert refusal(config(setting)) == f"{key} needs {package}: `{install}`, or leave it out"


def test_a_new_run_starts_from_a_checkpoint_of_the_same_model(config, tmp_path):
    other = tmp_path / "other"
    told = refusal(config(f"train.init_from={other}"))
    assert f"train.init_from {other} has no checkpoint: give the run_dir" in told
    started_run(other, config(f"train.run_dir={other}"))
    checkpoint = other / "checkpoints" / "step_1"
    told = refusal(config(f"train.init_from={checkpoint}"))
    assert f"{checkpoint} cannot be used: it has no manifest.json" in told
    assert told.endswith("the only one of its run, or leave it out to start from model.path")
    (checkpoint / "manifest.json").write_text('{"files": {}}')
    for start in (other, checkpoint):
        preflight(config(f"train.init_from={start}", "grpo.beta=0.1", "optimizer.lr=0.1"), None)
    of_another = json.loads((checkpoint / "hf_config" / "config.json").read_text())
    of_another["rope_parameters"]["rope_theta"] = 5e5
    (checkpoint / "hf_config" / "config.json").write_text(json.dumps(of_another))
    assert "is another model than" in refusal(config(f"train.init_from={other}"))


@pytest.mark.parametrize("before", [0, 1])
def test_only_a_run_that_trains_the_same_layers_starts_from_a_checkpoint(config, tmp_path, before):
    model = add_mtp_layer(tiny_model(tmp_path / "glm", "glm4_moe"))
    numbers = [f"model.mtp_num_layers={number}" for number in (before, 1 - before)]
    other, now = (config(f"model.path={model}", number) for number in numbers)
    run = tmp_path / "run"
    started_run(run, other)
    with pytest.raises(ValueError, match=r"run_dir with model.path=<export of that run>\n"):
        check_same_run(now)
    (run / "checkpoints" / "step_1" / "manifest.json").write_text('{"files": {}}')
    new = f"train.run_dir={tmp_path / 'new'}", f"train.init_from={run}", f"model.path={model}"
    check_start(config(*new, numbers[0]))
    moved = add_mtp_layer(tiny_model(tmp_path / "moved", "glm4_moe"))
    check_same_run(config(f"model.path={moved}", numbers[0]))
    told = f"{numbers[0]}: set that, or replace train.init_from by model.path=<export of that run>"
    with pytest.raises(ValueError, match=told):
        check_start(config(*new, numbers[1]))


def test_a_run_does_not_go_on_from_the_state_of_another_optimizer(config, tmp_path):
    run, muon = tmp_path / "run", "optimizer.optimizer=muon"
    started_run(run, config())
    with pytest.raises(ValueError, match=r"run_dir with model.path=<export of that run>\n"):
        check_same_run(config(muon))
    (run / "checkpoints" / "step_1" / "manifest.json").write_text('{"files": {}}')
    new = f"train.run_dir={tmp_path / 'new'}", f"train.init_from={run}"
    saved = run / "checkpoints" / "step_1" / "config.yaml"
    saved.write_text("optimizer: {key_of_old: 1}\n")  # from before there were two optimizers
    check_start(config(*new))
    with pytest.raises(ValueError, match=r"is of a run with optimizer.optimizer=adam: set that"):
        check_start(config(*new, muon))
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
def test_a_run_with_adapters_is_not_told_to_start_from_a_checkpoint(
    before, now, start, config, tmp_path
):
    run, merged = tmp_path / "run", "lora.sync=merged"
    started_run(run, config(merged, *before))
    with pytest.raises(ValueError) as refused:
        check_same_run(config(merged, "grpo.beta=0.1", *now))
    assert f"run in another train.run_dir with {start}" in str(refused.value)
    (run / "checkpoints" / "step_1" / "manifest.json").write_text('{"files": {}}')
    if before and not now:
        with pytest.raises(ValueError, match=r"has adapters alone: .* model.path=<what"):
            check_start(config(f"train.run_dir={tmp_path / 'new'}", f"train.init_from={run}"))


def test_run_may_resume_where_model_and_data_have_moved(config, model, tmp_path):
    started_run(tmp_path / "run", config())
    moved = copy_of(model, tmp_path / "moved")
    paths = f"model.path={moved}", f"data.path={tmp_path / 'rows.jsonl'}.moved"
    check_same_run(config(*paths))
    of_another = json.loads((moved / "config.json").read_text())
    of_another["rope_parameters"]["rope_theta"] = 5e5
    (moved / "config.json").write_text(json.dumps(of_another))
    told = r"moved is another model than .*step_1/hf_config.*\n.* 10000.0, 500000.0"
    with pytest.raises(ValueError, match=told):
        check_same_run(config(*paths))


def test_what_is_wrong_in_the_config_of_the_run_itself_is_told_with_its_file(config, tmp_path):
    started_run(tmp_path / "run", config())
    saved = tmp_path / "run" / "config.yaml"
    saved.write_text(saved.read_text().replace("kl_horizon: 10000", "kl_horizon: 0"))
    with pytest.raises(ValueError, match=r"run/config.yaml: config key grpo.kl_horizon = 0"):
        check_same_run(config())


def test_an_environment_needs_no_function_of_rewards(config, tmp_path):
    mine = f"environment.name={write_environments(tmp_path)}:Echo"
    preflight(config(mine, "reward.functions=[]"), None)


@pytest.mark.long
@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["environment.name=nowhere.py:Echo"], "file of an environment nowhere.py does not exist"),
        (["environment.name=MINE:Rigid"], "missing a required argument: 'size'"),
        (["environment.name=MINE:Curious"], "requires 'colour': 20 of 20 rows have no such column"),
        (["environment.name=MINE:Halved"], "has no method step"),
    ],
)
def test_an_environment_that_cannot_be_used_is_refused(config, tmp_path, overrides, told):
    mine = str(write_environments(tmp_path))
    assert told in refusal(config(*(o.replace("MINE", mine) for o in overrides)))


def test_an_agent_is_started_and_refused_if_it_cannot_be(config):
    agent = ["data.max_prompt_length=40", "agent.command=python nowhere.py"]
    told = refusal(config(*agent, "rollout.max_completion_length=20"))
    assert told.startswith("agent.command python nowhere.py cannot act on row 0: ")
    assert "nowhere.py': [Errno 2]" in told


@pytest.mark.long
def test_sources_are_checked_each_with_its_own_rows(config, tmp_path):
    data, mine = tmp_path / "kinds.jsonl", write_environments(tmp_path)
    rows = [{"prompt": f"{i}", "answer": "1", "kind": "ab"[i % 2]} for i in range(20)]
    rows = [row | ({"size": 1} if row["kind"] == "a" else {}) for row in rows]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward = "reward: {functions: [exact]}"
    sources = [f"data.path={data}", "sources.column=kind", f"sources.by_name.b={{{reward}}}"]
    _, told = preflight(config(*sources, f"sources.by_name.a.environment.name={mine}:Echo"), None)
    assert "optimizer steps on rows of b, a" in told
    curious = f"sources.by_name.a.environment.name={mine}:Curious"
    assert "requires 'colour': 10 of 10 rows have no such column" in refusal(
        config(*sources, curious)
    )
    assert (
        "sources.by_name.c: no row of data.path has this value in the column kind, only a, b"
        in refusal(
            config(*sources, f"sources.by_name.a={{{reward}}}", f"sources.by_name.c={{{reward}}}")
        )
    )
    assert "kind not in sources.by_name (b): 'a'" in refusal(config(*sources))


def test_a_resumed_run_may_change_the_patience_of_a_source_but_not_its_reward(config, tmp_path):
    sources = ["sources.column=kind", "sources.by_name={a.b/c: {reward: {functions: [exact]}}}"]
    started_run(tmp_path / "run", config(*sources))
    own = "sources.by_name={a.b/c: {reward: {functions: [OTHER], timeout: 5}}}"
    check_same_run(config(sources[0], own.replace("OTHER", "exact")))
    with pytest.raises(ValueError, match=r"reward.functions.*: .*exact.*before"):
        check_same_run(config(sources[0], own.replace("OTHER", "math_answer")))


def test_a_model_that_the_runs_export_would_replace_is_refused(config, model, tmp_path):
    (tmp_path / "run").mkdir()
    folder = copy_of(model, tmp_path / "run" / "hf_step_10")
    linked = tmp_path / "linked"
    linked.symlink_to(folder)
    for path in (folder, linked):
        message = refusal(config(f"model.path={path}"))
        assert f"model.path {path} would be overwritten by what the run exports to" in message
    preflight(config(f"model.path={linked}", f"train.run_dir={tmp_path / 'another'}"), None)


@pytest.mark.long
def test_a_chat_template_that_cannot_be_continued_is_refused(config, model, tmp_path):
    folder = copy_of(model, tmp_path / "model")
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("<eos>", ""))
    name = f"environment.name={write_environments(tmp_path)}:Echo"
    preflight(config(f"model.path={folder}"), None)
    assert "does not close the model's turn" in refusal(config(name, f"model.path={folder}"))


@pytest.mark.long
def test_a_chat_whose_turns_end_with_a_token_that_ends_no_completion_is_refused(
    config, model, tmp_path
):
    folder = copy_of(model, tmp_path / "base")
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("<eos>", "<start>"))
    path = f"model.path={folder}"
    told = "turn with the token <start> (3), and a completion ends with <eos> (1), so it would not"
    assert told in (refused := refusal(config(path)))
    assert "set rollout.stop_token_ids=[3], or data.apply_chat_template=false" in refused
    held_out = ("data.apply_chat_template=false", "eval.data.apply_chat_template=true")
    assert refusal(config(path, *held_out)).startswith("eval: the chat template ends")
    assert "rollout.stop_token_ids=[7, 3]" in refusal(config(path, "rollout.stop_token_ids=[7]"))
    preflight(config(path, "rollout.stop_token_ids=[3]"), None)
    preflight(config(path, "data.apply_chat_template=false"), None)
    template.write_text(template.read_text().replace("}}<start>", "}}<start><eos>"))
    preflight(config(path), None)


def test_a_run_of_an_earlier_version_may_lack_keys_that_have_a_default(config, tmp_path):
    started_run(tmp_path / "run", config())
    saved = yaml.safe_load(dump_config(config()))
    del saved["environment"]
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(saved))
    check_same_run(config())
    mine = f"environment.name={write_environments(tmp_path)}:Echo"
    with pytest.raises(ValueError, match=r"environment.name: None before, .*mine.py:Echo now"):
        check_same_run(config(mine))


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
def told_on_a_gpu(config, tmp_path):
    """Why a bfloat16 run is refused by a process that believes to have a GPU."""
    (tmp_path / "config.yaml").write_text(dump_config(config("model.dtype=bfloat16")))
    path = os.pathsep.join([str(tmp_path), str(REPOSITORY), os.environ.get("PYTHONPATH", "")])

    def told(*overrides: str) -> str:
        return subprocess.check_output(
            [sys.executable, "-W", "ignore", "-c", ON_A_GPU, tmp_path / "config.yaml", *overrides],
            env=os.environ | {"PYTHONPATH": path},
            text=True,
        )

    return told


@pytest.mark.slow
def test_layers_of_torch_on_a_gpu_must_be_asked_for(told_on_a_gpu):
    told = told_on_a_gpu()
    assert "Transformer Engine does not work here (No module named 'transformer_engine')" in told
    assert "model.megatron.transformer_impl=local" in told
    assert told_on_a_gpu("model.megatron.transformer_impl=local") == ""


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
def test_a_broken_transformer_engine_is_refused_with_the_reason(
    told_on_a_gpu, tmp_path, pytorch, reason
):
    write_transformer_engine(tmp_path, pytorch)
    told = told_on_a_gpu()
    assert reason in told and "requirements/gpu.sh" in told
