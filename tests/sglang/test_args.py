"""The arguments of an SGLang engine, against the installed SGLang."""

import pytest

from helpers.engines import SGLANG_PYTHON
from megatron_grpo.config.rollout import RolloutConfig
from megatron_grpo.engines.sglang.args import (
    RESERVED,
    check_sglang_arguments,
    sglang_argument_names,
)


def rollout(**table) -> RolloutConfig:
    return RolloutConfig(
        engine="sglang", python=SGLANG_PYTHON, max_completion_length=16, sglang=table
    )


def test_what_is_reserved_is_an_argument_of_sglang_and_refused():
    assert sglang_argument_names(str(SGLANG_PYTHON)) >= RESERVED.keys()
    for name in RESERVED:
        with pytest.raises(ValueError, match=rf"rollout\.sglang\.{name} cannot be set"):
            check_sglang_arguments(rollout(**{name: "x"}))


def test_an_unknown_argument_is_named_with_the_nearest():
    check_sglang_arguments(rollout(mem_fraction_static=0.5))
    with pytest.raises(ValueError, match="did you mean mem_fraction_static"):
        check_sglang_arguments(rollout(mem_fraction_statik=0.5))
