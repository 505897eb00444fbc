"""The arguments of an SGLang engine, against the installed SGLang."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from helpers.engines import SGLANG_PYTHON
from helpers.models import mixture_of_blocks, servable_model
from megatron_grpo.config.rollout import RolloutConfig
from megatron_grpo.config.train import ModelConfig
from megatron_grpo.engines.sglang.args import (
    NEEDED,
    check_sglang_arguments,
    sglang_argument_names,
    sglang_command,
)
from megatron_grpo.engines.sglang.reserved import RESERVED
from megatron_grpo.engines.sglang.variables import REFUSED

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


def test_what_is_reserved_is_an_argument_of_sglang_and_refused():
    assert sglang_argument_names(str(SGLANG_PYTHON)) >= RESERVED.keys() >= NEEDED.keys()
    for name in RESERVED:
        with pytest.raises(ValueError, match=rf"rollout\.sglang\.{name} cannot be set"):
            check_sglang_arguments(rollout(**{name: "x"}))


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
    told = (runtime / "environ.py").read_text()
    told += (runtime / "entrypoints" / "http_server.py").read_text()
    for pattern in REFUSED:
        assert re.search(rf"\b{pattern}\b", told), pattern


def test_requests_are_not_dealt_out_by_rooms_that_they_do_not_have():
    check_sglang_arguments(rollout(load_balance_method="total_tokens"))
    with pytest.raises(ValueError, match="load_balance_method follow_bootstrap_room needs"):
        check_sglang_arguments(rollout(load_balance_method="follow_bootstrap_room"))


@pytest.mark.slow  # SGLang is imported
def test_a_server_that_a_user_starts_answers_nobody_without_the_token(tmp_path):
    environment = os.environ | {"SGLANG_USE_CPU_ENGINE": "1"}
    environment["MODEL"] = str(servable_model(tmp_path, "qwen3"))
    told = subprocess.run(
        [SGLANG_PYTHON, "-P", "-c", GUARDED], capture_output=True, text=True, env=environment
    )
    variable, argument, flag = told.stdout.splitlines()[-3:]
    assert variable.startswith("SGLANG_GRPC_PORT=2 in the environment does not go")
    assert argument.startswith("--tokenizer-worker-num cannot be set")
    assert flag.startswith("--smg-grpc-mode cannot be set")
