"""The arguments of an SGLang engine, against the installed SGLang."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from helpers.engines.live import SGLANG_PYTHON
from helpers.models.tiny import mixture_of_blocks, servable_model
from megatron_grpo.config.rollout import RolloutConfig
from megatron_grpo.config.train import ModelConfig
from megatron_grpo.engines.sglang.args import (
    REFUSED,
    check_sglang_arguments,
    sglang_argument_names,
    sglang_command,
)
from megatron_grpo.engines.sglang.variables import REFUSED as REFUSED_VARIABLES

PARSE = """
import json, sys
from argparse import ArgumentParser
from sglang.srt.server_args import ServerArgs
parser = ArgumentParser()
ServerArgs.add_cli_args(parser)
print(json.dumps(vars(parser.parse_args(sys.argv[1:])), default=str))
"""

FIND = "from importlib.util import find_spec; print(find_spec('sglang').origin)"
GUARDED = """
import os
import sys
from megatron_grpo.engines.sglang import server
for name, flag in [
    ("SGLANG_GRPC_PORT", ""), ("OTHER", "--tokenizer-worker-num=2"), ("OTHER", "--smg-grpc-mode")
]:
    os.environ[name] = "2"
    sys.argv[1:] = [f"--model-path={os.environ['MODEL']}", flag][: 1 + bool(flag)]
    try:
        server.main()
    except ValueError as error:
        print(error)
    del os.environ[name]
"""


def rollout(**table) -> RolloutConfig:
    return RolloutConfig(
        engine="sglang", python=SGLANG_PYTHON, max_completion_length=16, sglang=table
    )


OF_ENGINES = """
    admin_api_key allow_auto_truncate api_key attn_cp_size attn_dp_size chat_template
    completion_template cpu_offload_gb custom_weight_loader dcp_replicate_q_proj dcp_size
    decrypted_config_file default_chat_template_kwargs delete_ckpt_after_loading device
    disable_priority_preemption disable_shared_experts_fusion disaggregation_mode
    dist_init_addr dllm_algorithm dp_size dtype dwdp_size enable_custom_logit_processor
    enable_dp_attention enable_dp_attention_local_control_broadcast enable_dp_lm_head
    enable_eplb enable_flexkv enable_hierarchical_cache enable_lmcache enable_lora
    enable_memory_saver enable_mm_global_cache enable_multimodal
    enable_precise_embedding_interpolation enable_prefill_cp enable_priority_scheduling
    enable_return_indexer_topk enable_return_routed_experts enable_strict_thinking
    enable_tp_lm_head_all_to_all enable_unified_cache_external_linker enable_watermark
    encoder_only enforce_shared_experts_fusion ep_num_redundant_experts fp8_gemm_runner_backend
    grpc_mode grpc_port hf_chat_template_name host incremental_streaming_output
    init_expert_location json_model_override_args language_model_only language_only lora_paths
    lora_target_modules max_lora_rank max_queued_requests mm_feature_transport model_path
    modelopt_quant moe_a2a_backend moe_dense_tp_size moe_dp_size moe_runner_backend nnodes
    node_rank offload_group_size port pp_size preferred_sampling_params
    priority_scheduling_preemption_threshold quantization quantize_and_serve revision
    rl_quant_profile sampling_defaults schedule_low_priority_values_first skip_server_warmup
    skip_tokenizer_init smg_grpc_mode speculative_algorithm speculative_draft_model_path
    speculative_eagle_topk speculative_num_draft_tokens speculative_num_steps tokenizer_mode
    tokenizer_path tokenizer_worker_num tool_call_parser tp_size trust_request_chat_template
    watermark_config watermark_context_window watermark_default_enabled watermark_enforce_all
    watermark_key watermark_key_b watermark_max_probability watermark_mixing_probability
    weight_cache_mode weight_version
"""


def refusal(name: str) -> str:
    try:
        check_sglang_arguments(rollout(**{name: "x"}))
    except ValueError as error:
        return str(error)
    return ""


def test_only_arguments_that_are_wrong_or_without_effect_are_refused():
    known = sglang_argument_names(str(SGLANG_PYTHON))
    assert {name for name in known if "cannot be set" in refusal(name)} == {*OF_ENGINES.split()}
    assert all(any(re.fullmatch(each, name) for name in known) for each in REFUSED)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("dtype", "set model.dtype"),
        ("tp_size", "set rollout.tensor_parallel_size"),
        ("dist_init_addr", "a run sets it, by its own keys"),
        ("sampling_defaults", "a run sets it, by its own keys"),  # in our server
    ],
)
def test_an_argument_that_a_run_sets_itself_is_refused(name, why):
    assert refusal(name) == f"rollout.sglang.{name} cannot be set: {why}"


def test_an_unknown_argument_is_named_with_the_nearest():
    check_sglang_arguments(rollout(mem_fraction_static=0.5))
    with pytest.raises(ValueError, match="did you mean mem_fraction_static"):
        check_sglang_arguments(rollout(mem_fraction_statik=0.5))


def test_sglang_takes_the_command_of_an_engine_in_fp8_on_gpus(tmp_path):
    model = ModelConfig(path=mixture_of_blocks(tmp_path, "qwen3_moe"), dtype="bfloat16")
    config = rollout(mem_fraction_static=0.5).model_copy(update={"quantization": "fp8"})
    interpreter, _, _, _, *flags = sglang_command(model, config, "10.0.0.7", 8000, on_gpu=True)
    parsed = subprocess.run(
        [interpreter, "-P", "-c", PARSE, *flags], capture_output=True, text=True, check=True
    )
    found = json.loads(parsed.stdout.splitlines()[-1])
    overrides = json.loads(found["json_model_override_args"])
    assert overrides["quantization_config"]["weight_block_size"] == [128, 128]
    assert (
        found.items()
        >= {
            "fp8_gemm_runner_backend": "triton",
            "moe_runner_backend": "triton",
            "mem_fraction_static": 0.5,
            "port": 8000,
        }.items()
    )


@pytest.mark.parametrize(
    "name",
    [
        "SGLANG_GRPC_PORT",
        "SGL_GRPC_PORT",  # a former name, which SGLang still follows
        "SGLANG_RETURN_ORIGINAL_LOGPROB",
        "SGLANG_REQ_RUNNING_TIMEOUT",
        "SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD",
        "SGLANG_SIMULATE_UNIFORM_EXPERTS",
    ],
)
def test_a_variable_that_would_break_a_run_is_refused_by_name(monkeypatch, name):
    check_sglang_arguments(rollout())
    monkeypatch.setenv(name, "1")
    with pytest.raises(ValueError, match=f"^{name}=1 in the environment does not go"):
        check_sglang_arguments(rollout())


def test_sglang_has_the_variables_that_are_refused():
    found = subprocess.run([SGLANG_PYTHON, "-P", "-c", FIND], capture_output=True, text=True)
    runtime = Path(found.stdout.strip()).parent / "srt"
    source = (runtime / "environ.py").read_text()
    source += (runtime / "entrypoints" / "http_server.py").read_text()
    for pattern in REFUSED_VARIABLES:
        assert re.search(rf"\b{pattern}\b", source), pattern


def test_requests_are_not_distributed_by_bootstrap_rooms():
    check_sglang_arguments(rollout(load_balance_method="total_tokens"))
    with pytest.raises(ValueError, match="load_balance_method follow_bootstrap_room needs"):
        check_sglang_arguments(rollout(load_balance_method="follow_bootstrap_room"))


@pytest.mark.slow  # SGLang is imported
def test_a_server_started_by_a_user_refuses_requests_without_the_token(tmp_path):
    environment = os.environ | {"SGLANG_USE_CPU_ENGINE": "1"}
    environment["MODEL"] = str(servable_model(tmp_path, "qwen3"))
    finished = subprocess.run(
        [SGLANG_PYTHON, "-P", "-c", GUARDED], capture_output=True, text=True, env=environment
    )
    variable, argument, flag = finished.stdout.splitlines()[-3:]
    assert variable.startswith("SGLANG_GRPC_PORT=2 in the environment does not go")
    assert argument.startswith("--tokenizer-worker-num cannot be set")
    assert flag.startswith("--smg-grpc-mode cannot be set")
