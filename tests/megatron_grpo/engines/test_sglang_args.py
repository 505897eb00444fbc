"""The command line of an SGLang engine; tests/sglang compares it with SGLang itself."""

import json
import math
import sys
from pathlib import Path

import pytest

from checkpoint_convert.folder import read_json
from helpers.models.mxfp4 import mxfp4_copies
from helpers.models.tiny import mixture_of_blocks, tiny_model
from helpers.models.towers import tiny_multimodal
from megatron_grpo.config.rollout import RolloutConfig
from megatron_grpo.config.train import ModelConfig
from megatron_grpo.engines.arguments import EngineNode
from megatron_grpo.engines.sglang.args import (
    check_folder_loaded,
    check_sglang_arguments,
    sglang_command,
    sglang_environment,
)
from megatron_grpo.engines.sglang.model_folder import (
    WEIGHTS_VARIABLE,
    plain_folder,
    server_arguments,
)
from megatron_grpo.engines.support import check_towers_served

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "attention_factor": 2 + 0.2 * math.log(4.0),
}
OF_BLOCKS = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 128}


def rollout(**options) -> RolloutConfig:
    return RolloutConfig(engine="sglang", max_completion_length=16, **options)


@pytest.mark.parametrize(
    ("python", "error"),
    [
        ("/nowhere/python", "rollout.python /nowhere/python cannot be started: No such file"),
        (sys.executable, "is not installed for .*: run `make setup-sglang`"),
    ],
)
def test_an_interpreter_without_sglang_is_named_with_what_to_do(python, error):
    with pytest.raises(ValueError, match=error):
        check_sglang_arguments(rollout(python=Path(python)))


def test_a_command_has_the_runs_settings_then_the_passed_options(tmp_path):
    model = ModelConfig(path=tiny_model(tmp_path, "qwen3"))
    options = {"tensor_parallel_size": 2, "enable_sleep_mode": True}
    config = rollout(**options, sglang={"mem_fraction_static": 0.5})
    command = sglang_command(model, config, "10.0.0.7", 8000, on_gpu=True)
    assert command[0] == sys.executable
    assert {f"--model-path={tmp_path}", "--tp-size=2", "--host=10.0.0.7", "--port=8000"} < {
        *command
    }
    assert {"--mem-fraction-static=0.5", "--enable-memory-saver"} < {*command}
    assert "--device=cpu" not in command
    assert not any("fp8" in each for each in command)
    on_cpu = sglang_command(model, config, "10.0.0.7", 8000, on_gpu=False)
    assert "--device=cpu" in on_cpu and "--enable-memory-saver" not in on_cpu


@pytest.mark.parametrize("address", ["10.0.0.7", "fd00::7"])
def test_nodes_of_an_engine_differ_in_their_number_only(tmp_path, address):
    model = ModelConfig(path=tiny_model(tmp_path, "qwen3"))
    nodes = [EngineNode(2, rank, address, 29501) for rank in range(2)]
    config = rollout(tensor_parallel_size=16)
    first, second = ({*sglang_command(model, config, address, 8000, True, node)} for node in nodes)
    assert (first - second, second - first) == ({"--node-rank=0"}, {"--node-rank=1"})
    place = address if "." in address else f"[{address}]"
    expected = {"--tp-size=16", "--nnodes=2", f"--dist-init-addr={place}:29501"}
    assert expected < first
    assert not any("nnodes" in each for each in sglang_command(model, config, address, 8000, True))


def test_workers_of_all_groups_are_those_of_one_engine(tmp_path):
    model = ModelConfig(path=tiny_model(tmp_path, "qwen3_moe"))
    sizes = {"tensor_parallel_size": 2, "data_parallel_size": 2, "sglang": {"ep_size": 4}}
    command = sglang_command(model, rollout(**sizes), "10.0.0.7", 8000, on_gpu=True)
    flags = {"--tp-size=4", "--attn-dp-size=2", "--enable-dp-lm-head", "--ep-size=4"}
    assert flags < {*command}
    bound = sglang_environment(model, rollout(**sizes), on_gpu=False)["SGLANG_CPU_OMP_THREADS_BIND"]
    assert len(bound.split("|")) == 4


@pytest.mark.parametrize(
    ("family", "on_gpu", "argument"),
    [
        ("gpt_oss", True, "--attention-backend=triton"),
        ("gpt_oss", False, "--attention-backend=intel_amx"),
        ("qwen3_next", True, "--mamba-ssm-dtype=float32"),
        ("deepseek_v32", True, "--kv-cache-dtype=bfloat16"),
        ("glm_moe_dsa", True, '"index_topk": 5, "index_n_heads": 16, "index_head_dim": 12}'),
        ("qwen3_next", True, '"full_attention_interval": 3}'),
        ("olmo3", True, '{"rope_theta": 10000.0, "rope_type": "default"}}'),
    ],
)
def test_options_that_a_kind_of_attention_needs_are_passed(tmp_path, family, on_gpu, argument):
    model = ModelConfig(path=tiny_model(tmp_path, family), dtype="float32")
    command = sglang_command(model, rollout(), "10.0.0.7", 8000, on_gpu)
    assert any(each.endswith(argument) for each in command)


@pytest.mark.parametrize("is_on", [True, False])
def test_chosen_tokens_are_returned_by_position_if_they_are_replayed(tmp_path, is_on):
    model = ModelConfig(path=tiny_model(tmp_path, "deepseek_v32"))
    config = rollout(indexer_replay=is_on)
    command = sglang_command(model, config, "10.0.0.7", 8000, on_gpu=True)
    assert ("--enable-return-indexer-topk" in command) == is_on
    environment = sglang_environment(model, config, on_gpu=True)
    assert environment.get("SGLANG_DSA_FUSE_TOPK") == ("0" if is_on else None)


@pytest.mark.parametrize(("family", "keys"), [("qwen3", 3), ("olmo3", 11)])
def test_yarns_attention_factor_is_passed_over_sglangs(tmp_path, family, keys):
    folder = tiny_model(tmp_path, family)
    config = json.loads((folder / "config.json").read_text())
    ropes = {"full_attention": YARN, "sliding_attention": {"rope_theta": 10_000.0}}
    config["rope_parameters"] = ropes if family == "olmo3" else YARN
    (folder / "config.json").write_text(json.dumps(config))
    command = sglang_command(ModelConfig(path=folder), rollout(), "10.0.0.7", 8000, on_gpu=True)
    [overrides] = [each for each in command if each.startswith("--json-model-override-args=")]
    found = json.loads(overrides.partition("=")[2])["rope_parameters"]
    assert len(found) == keys
    assert (found["attn_factor"], found["mscale"]) == (pytest.approx(2.0), None)


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_next"])
def test_families_with_layers_in_the_dtype_of_config_json_are_served_in_no_other(tmp_path, family):
    folder = tiny_model(tmp_path, family)
    check_folder_loaded(ModelConfig(path=folder, dtype="float32"), rollout())
    error = "dtype is float32, .* set model.dtype=float32, or convert the model to bfloat16"
    with pytest.raises(ValueError, match=error):
        check_folder_loaded(ModelConfig(path=folder, dtype="bfloat16"), rollout())


def test_sglang_gets_a_text_tower_as_a_class_that_it_has(tmp_path, monkeypatch):
    monkeypatch.setenv(WEIGHTS_VARIABLE, "")
    model = tiny_multimodal(tmp_path / "model", "kimi_k25")
    folder = plain_folder(model, tmp_path / "own")
    assert read_json(folder / "config.json")["architectures"] == ["DeepseekV3ForCausalLM"]


def test_sglang_gets_the_whole_model_if_prompts_have_images(tmp_path):
    model = ModelConfig(path=tiny_multimodal(tmp_path / "model", "qwen3_vl"))
    config = rollout(sglang={"limit_mm_data_per_request": {"image": 2}})
    command = sglang_command(model, config, "10.0.0.7", 8000, on_gpu=True)
    arguments = server_arguments(command[4:], tmp_path / "own")
    assert f"--model-path={model.path}" in arguments
    assert '--limit-mm-data-per-request={"image": 2}' in arguments
    assert not (tmp_path / "own").exists()


@pytest.mark.parametrize(
    ("family", "part", "change", "error"),
    [
        ("qwen3_vl", "text_config", {"rms_norm_eps": 1e-5}, "needs 1e-06 as the rms_norm_eps"),
        ("qwen3_vl_moe", "vision_config", {"deepstack_visual_indexes": [0]}, "needs 3 as the num"),
        ("qwen2_5_vl", "vision_config", {"patch_size": 16}, "needs 1176 as the .* it is 1536"),
        ("qwen2_5_vl", "text_config", {}, "needs None as rollout.sglang.rl_on_policy_target"),
        ("qwen3_5", "text_config", {}, "lets engines see images, and model.path is a qwen3_5"),
    ],
)
def test_towers_that_sglang_computes_differently_are_refused(tmp_path, family, part, change, error):
    folder = tiny_multimodal(tmp_path, family)
    config = read_json(folder / "config.json")
    table = {"limit_mm_data_per_request": {"image": 1}}
    check_towers_served(ModelConfig(path=folder), rollout())
    if family != "qwen3_5":
        check_towers_served(ModelConfig(path=folder), rollout(sglang=table))
    config[part] |= change
    (folder / "config.json").write_text(json.dumps(config))
    table |= {} if change else {"rl_on_policy_target": "fsdp"}
    with pytest.raises(ValueError, match=error):
        check_towers_served(ModelConfig(path=folder), rollout(sglang=table))


def test_load_formats_are_refused_for_folders_that_engines_convert(tmp_path):
    quantized, plain = mxfp4_copies(tiny_model(tmp_path / "model", "gpt_oss"), tmp_path)
    multimodal = tiny_multimodal(tmp_path / "multimodal", "qwen3_vl")
    chosen = rollout(sglang={"load_format": "runai_streamer"})
    check_folder_loaded(ModelConfig(path=plain, dtype="float32"), chosen)
    for folder in (quantized, multimodal):
        check_folder_loaded(ModelConfig(path=folder), rollout(sglang={"load_format": "dummy"}))
        with pytest.raises(ValueError, match="load_format runai_streamer does not go with towers"):
            check_folder_loaded(ModelConfig(path=folder), chosen)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_quantised_engines_have_the_scheme_and_products_that_leave_weights_as_loaded(
    tmp_path, on_gpu
):
    model = ModelConfig(path=tiny_model(tmp_path, "qwen3", **OF_BLOCKS), dtype="bfloat16")
    config = rollout(quantization="fp8")
    command = sglang_command(model, config, "10.0.0.7", 8000, on_gpu)
    [overrides] = [each for each in command if each.startswith("--json-model-override-args=")]
    table = json.loads(overrides.partition("=")[2])["quantization_config"]
    assert (table["quant_method"], table["weight_block_size"]) == ("fp8", [128, 128])
    assert ("--fp8-gemm-backend=triton" in command) == on_gpu
    assert sglang_environment(model, config, on_gpu)["MEGATRON_GRPO_QUANTIZATION"] == "fp8"
    with pytest.raises(ValueError, match=r"rollout\.sglang\.load_format dummy does not go with"):
        loading = rollout(quantization="fp8", sglang={"load_format": "dummy"})
        sglang_command(model, loading, "10.0.0.7", 8000, on_gpu)


@pytest.mark.parametrize("family", ["llama", "ministral3", "mistral", "phi3"])
def test_families_whose_scales_sglang_drops_are_refused(tmp_path, family):
    model = ModelConfig(path=tiny_model(tmp_path, family, **OF_BLOCKS), dtype="bfloat16")
    with pytest.raises(ValueError, match=f"for {family}, whose scales SGLang drops: leave it out"):
        sglang_command(model, rollout(quantization="fp8"), "10.0.0.7", 8000, on_gpu=True)


def test_modules_that_sglang_quantises_though_they_are_ignored_are_refused(tmp_path):
    model = ModelConfig(path=mixture_of_blocks(tmp_path, "glm4_moe_lite"), dtype="bfloat16")
    config = rollout(quantization="fp8", quantization_ignore=[r"re:model\.layers\.0\.self_attn\."])
    with pytest.raises(ValueError, match="kv_a_proj_with_mqa, which SGLang quantises in glm4_moe_"):
        sglang_command(model, config, "10.0.0.7", 8000, on_gpu=True)
