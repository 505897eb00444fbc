"""The command line of a vLLM engine and what may be passed through to it."""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from checkpoint_convert import read_shape
from checkpoint_convert.quantized.model import quantized_model
from helpers.models.tiny import tiny_model
from megatron_grpo.config.lora import LoraConfig
from megatron_grpo.config.rollout import RolloutConfig
from megatron_grpo.config.train import ModelConfig
from megatron_grpo.engines.arguments import EngineNode, engine_number, fields_of
from megatron_grpo.engines.support import CPU_HEAD_SIZES
from megatron_grpo.engines.vllm.args import (
    REFUSED,
    check_engine_arguments,
    engine_argument_names,
    engine_flags,
    vllm_command,
)

MODEL = ModelConfig(path=Path("/models/tiny"), dtype="float32")


def config(vllm: dict | None = None, **rollout) -> RolloutConfig:
    return RolloutConfig(max_completion_length=16, vllm=vllm or {}, **rollout)


def command(vllm: dict | None = None, on_gpu: bool = False, **rollout) -> list[str]:
    return vllm_command(MODEL, config(vllm, **rollout), "10.0.0.7", 8000, on_gpu)


def test_vllm_command_has_the_runs_model_type_and_address():
    flags = {*command(tensor_parallel_size=2)}
    assert {"--model=/models/tiny", "--dtype=float32", "--tensor-parallel-size=2"} < flags
    assert {"--host=10.0.0.7", "--port=8000"} < flags
    # Mistral's own files may lie beside those that the trainer reads.
    assert {"--config-format=hf", "--load-format=hf", "--tokenizer-mode=hf"} < flags


@pytest.mark.parametrize(
    ("num_completions", "settings", "limit"),
    [
        (256, {}, None),  # vLLM's own limit on any GPU, which may be larger
        (257, {}, "1024"),
        (512, {"data_parallel_size": 2}, None),  # the limit of each group
        (512, {"vllm": {"max_num_seqs": 300}}, "300"),
        (512, {"vllm": {"max_num_batched_tokens": 512}}, None),  # vLLM refuses a lower one
    ],
)
def test_completions_of_a_generation_do_not_queue_at_vllms_limit_of_small_gpus(
    num_completions, settings, limit
):
    flags = engine_flags(MODEL, config(**settings), True, num_completions=num_completions)
    assert [f for f in flags if "max-num-seqs" in f] == [f"--max-num-seqs={limit}"] * bool(limit)
    on_cpu = engine_flags(MODEL, config(), False, num_completions=num_completions)
    assert not any("max-num-seqs" in flag for flag in on_cpu)


def test_adapters_beside_routers_that_only_ranks_would_round_are_refused(tmp_path):
    served, lora = tiny_model(tmp_path, "glm4_moe"), LoraConfig(r=1, target_modules=("o_proj",))
    assert engine_flags(MODEL.model_copy(update={"path": served}), config(), False, lora)
    rounded = ModelConfig(path=served, dtype="bfloat16")
    with pytest.raises(ValueError, match=r"has routers in float32, .*: set lora\.sync=merged"):
        engine_flags(rounded, config(), False, lora)


def test_vllm_command_of_further_nodes_has_the_settings_but_no_server():
    sizes = config({"max_num_seqs": 3}, tensor_parallel_size=16)
    nodes = [EngineNode(2, rank, "10.0.0.7", 29501) for rank in range(2)]
    commands = [vllm_command(MODEL, sizes, "10.0.0.7", 8000, True, node) for node in nodes]
    settings = [{flag for flag in flags if flag.startswith("--")} for flags in commands]
    server = {"--host=10.0.0.7", "--port=8000", "--enable-scale-out", "--node-rank=0"}
    assert server < settings[0]
    assert settings[1] - settings[0] == {"--headless", "--node-rank=1"}
    shared = {"--tensor-parallel-size=16", "--max-num-seqs=3", "--nnodes=2"}
    shared |= {"--master-addr=10.0.0.7", "--master-port=29501"}
    assert shared < settings[0] & settings[1]


def test_passed_options_win_in_the_vllm_command():
    table = {
        "block_size": 64,
        "enforce_eager": False,
        "enable_prefix_caching": True,
        "additional_config": {"a": 1},
        "served_model_name": ["one", "two"],
        "quantization": None,
    }
    flags = command(table)
    assert "--block-size=64" in flags and "--block-size=32" not in flags
    assert "--no-enforce-eager" in flags and "--enforce-eager" not in flags
    assert "--enable-prefix-caching" in flags
    assert '--additional-config={"a": 1}' in flags
    place = flags.index("--served-model-name")
    assert flags[place + 1 : place + 3] == ["one", "two"]
    assert not any("quantization" in flag for flag in flags)


def test_a_quantised_folder_is_built_and_loaded_as_an_unquantised_one(tmp_path):
    table = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (tmp_path / "config.json").write_text(json.dumps(table))
    model = MODEL.model_copy(update={"path": tmp_path})

    def flags(on_gpu=False, **vllm):
        return vllm_command(model, config(vllm), "10.0.0.7", 8000, on_gpu)

    overrides = '"quantization_config": null, "compression_config": null}'
    assert {"--load-format=dequantized", f"--hf-overrides={{{overrides}"} < set(flags())
    assert f'--hf-overrides={{"head_dtype": "float32", {overrides}' in flags(on_gpu=True)
    assert "--load-format=dummy" in flags(load_format="dummy")
    with pytest.raises(ValueError, match=r"rollout\.vllm\.load_format runai_streamer would load"):
        flags(load_format="runai_streamer")


def test_an_engine_of_quantised_weights_has_the_config_of_the_export(tied_model):
    model = ModelConfig(path=tied_model, dtype="bfloat16")

    def flags(on_gpu=False, **vllm):
        rollout = config(vllm, quantization="int8")
        return vllm_command(model, rollout, "10.0.0.7", 8000, on_gpu)

    quantized = quantized_model("int8", read_shape(tied_model), "BF16")
    given = {"quantization_config": quantized.config, "compression_config": None}
    assert f"--hf-overrides={json.dumps(given)}" in flags()
    assert "--load-format=quantized_int8" in flags()
    given = {"head_dtype": "float32", **given}
    assert {f"--hf-overrides={json.dumps(given)}", "--linear-backend=cutlass"} < {*flags(True)}
    assert "--load-format=dummy" in flags(load_format="dummy")
    with pytest.raises(ValueError, match="weights of another dtype than engines have: leave it"):
        flags(load_format="safetensors")


def test_vllm_command_of_cpus_has_other_settings_than_that_of_gpus():
    of_cpu = {"--enforce-eager", "--no-enable-chunked-prefill", "--attention-backend=CPU_MLA"}
    of_gpu = {'--hf-overrides={"head_dtype": "float32"}', "--enable-sleep-mode"}
    cpu, gpu = (set(command(on_gpu=on_gpu, enable_sleep_mode=True)) for on_gpu in (False, True))
    assert of_cpu < cpu and of_gpu < gpu
    assert not of_cpu & gpu and not of_gpu & cpu
    assert "--enable-sleep-mode" not in command(on_gpu=True)


def test_routes_are_requested_only_where_vllm_returns_them():
    flag = "--enable-return-routed-experts"
    assert flag in command(on_gpu=True, router_replay=True)
    assert flag not in command(on_gpu=True)
    with pytest.raises(ValueError, match="returns the experts of tokens only on GPUs"):
        command(router_replay=True)


def test_check_engine_arguments_refuses_an_unknown_one_with_the_nearest_known():
    with pytest.raises(
        ValueError, match=r"rollout\.vllm\.max_modellen .* did you mean max_model_len"
    ):
        check_engine_arguments({"max_num_seqs": 8, "max_modellen": 512})
    check_engine_arguments({}, "hermes")
    with pytest.raises(ValueError, match=r"rollout\.tool_call_parser hermess: vLLM has .*hermes, "):
        check_engine_arguments({}, "hermess")


OF_ENGINES = """
    code_revision config_format cpu_offload_gb data_parallel_size default_mm_loras
    disable_log_stats dtype enable_eplb enable_lora enable_mixed_moe_lora_format
    enable_moe_shared_loras enable_return_routed_experts enable_sleep_mode
    enable_tower_connector_lora eplb_config expert_placement_strategy fully_sharded_loras
    generation_config hf_config_path hf_overrides kernel_config kv_offloading_size
    kv_transfer_config linear_backend logits_processors logprobs_mode lora_dtype
    lora_target_modules master_addr master_port max_cpu_loras max_logprobs max_lora_cls_labels
    max_lora_rank max_loras max_num_queued_reqs max_num_queued_tokens mm_device_do_normalize
    mm_processor_kwargs model model_weights moe_backend nnodes node_rank offload_group_size
    override_generation_config pipeline_parallel_size quantization quantization_config
    reasoning_config revision scheduling_policy seed skip_tokenizer_init spec_method spec_model
    spec_tokens specialize_active_lora tensor_parallel_size tokenizer tokenizer_mode
    tokenizer_revision tokens_only watermark_config weight_transfer_config worker_extension_cls
"""
RUN = "a run sets it, by its own keys"
OF_KEYS = {
    "dtype": "set model.dtype",
    "enable_sleep_mode": "set rollout.enable_sleep_mode",
    "enable_return_routed_experts": "set rollout.router_replay",
    "scheduling_policy": RUN,
    "nnodes": RUN,
    "port": RUN,
}
OF_SERVERS = """
    api_key chat_template default_chat_template_kwargs enable_auto_tool_choice host port
    tool_call_parser trust_request_chat_template
"""


def refusal(name: str) -> str:
    try:
        check_engine_arguments({name: "x"})
    except ValueError as error:
        return str(error)
    return ""


def test_check_engine_arguments_refuses_silently_wrong_or_idle_ones():
    known = engine_argument_names()
    assert {name for name in known if "cannot be set" in refusal(name)} == {*OF_ENGINES.split()}
    for name, key in OF_KEYS.items():
        assert refusal(name) == f"rollout.vllm.{name} cannot be set: {key}"
    of_server = fields_of(installed_vllm() / "entrypoints" / "launchers" / "cli_args.py")
    for name in OF_SERVERS.split():
        assert name in of_server and "cannot be set" in refusal(name)
    assert all(any(re.fullmatch(each, name) for name in known | of_server) for each in REFUSED)


def installed_vllm() -> Path:
    (folder,) = find_spec("vllm").submodule_search_locations
    return Path(folder)


def test_the_installed_vllm_examines_models_in_the_replaced_function():
    registry = installed_vllm() / "model_executor" / "models" / "registry.py"
    assert "mi = _run_in_subprocess(\n            lambda: " in registry.read_text()


def test_the_head_sizes_of_cpus_are_those_of_the_installed_vllm():
    attention = installed_vllm() / "v1" / "attention" / "backends" / "cpu_attn.py"
    assert f"return {list(CPU_HEAD_SIZES)}" in attention.read_text()


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (4096, 4096),
        ("4k", 4000),
        ("4K", 4096),
        ("25.6k", 25_600),
        ("20G", 20 * 2**30),
        ("auto", None),
        (-1, None),
        (None, None),
    ],
)
def test_engine_number_is_read_as_vllm_reads_it(value, number):
    assert engine_number(config({"max_model_len": value}), "max_model_len") == number


@pytest.mark.parametrize("value", ["4.5K", "4 k", "many", 2e10, "-4"])
def test_engine_number_refuses_what_vllm_refuses(value):
    with pytest.raises(ValueError, match=r"rollout\.vllm\.max_model_len .* not a number"):
        engine_number(config({"max_model_len": value}), "max_model_len")
