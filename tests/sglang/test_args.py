"""The arguments of an SGLang engine, against the installed SGLang."""

import json
import subprocess

import pytest

from helpers.engines import SGLANG_PYTHON
from helpers.models import mixture_of_blocks
from megatron_grpo.config.rollout import RolloutConfig
from megatron_grpo.config.train import ModelConfig
from megatron_grpo.engines.sglang.args import (
    NEEDED,
    RESERVED,
    check_sglang_arguments,
    sglang_argument_names,
    sglang_command,
)

PARSE = """
import json, sys
from argparse import ArgumentParser
from sglang.srt.server_args import ServerArgs
parser = ArgumentParser()
ServerArgs.add_cli_args(parser)
print(json.dumps(vars(parser.parse_args(sys.argv[1:])), default=str))
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
