"""YaRN: its frequencies in transformers and in vLLM. Rows of test_model.py have whole models."""

from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3 import Qwen3Config

from checkpoint_convert import read_shape
from checkpoint_convert.vllm import EngineDims
from helpers.engines.vllm_workers import read_in_workers
from helpers.models.tiny import servable_model
from megatron_grpo.policy.rope import yarn_frequencies

QWEN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
SHORT = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def plain_frequencies(head_dim: int, theta: float) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, head_dim, 2) / head_dim)


@pytest.mark.parametrize(
    ("change", "theta", "head_dim"),
    [
        ({}, 1e6, 128),
        ({"factor": 2.5}, 5e5, 64),
        ({"factor": 1.0}, 1e6, 128),
        ({"truncate": False}, 1e6, 128),
        ({"beta_fast": 16.0, "beta_slow": 2.0}, 1e6, 128),
        ({"beta_fast": 1.0, "beta_slow": 32.0}, 1e6, 128),
        # A ramp that begins below the first pair, one that ends far above the last, and none.
        ({"original_max_position_embeddings": 4}, 1e4, 32),
        ({"original_max_position_embeddings": 10**6, "beta_fast": 1e5}, 10.0, 32),
        ({"beta_fast": 3.0, "beta_slow": 3.0, "truncate": False}, 1e6, 128),
    ],
    ids=str,
)
def test_yarn_frequencies_equal_those_of_transformers(tmp_path, change, theta, head_dim):
    length = 4  # below every factor * trained length
    config = Qwen3Config(
        head_dim=head_dim,
        max_position_embeddings=length,
        rope_parameters=QWEN | change | {"rope_theta": theta},
    )
    config.save_pretrained(tmp_path)
    expected, _ = ROPE_INIT_FUNCTIONS["yarn"](config)
    scaling = read_shape(tmp_path).rope_scaling
    frequencies = yarn_frequencies(plain_frequencies(head_dim, theta), theta, scaling)
    torch.testing.assert_close(frequencies, expected, rtol=3e-7, atol=0)


def cosines_and_sines(model: torch.nn.Module, folder: Path, dims: EngineDims) -> Tensor:
    """The RoPE table of a vLLM worker's model: [positions, head_dim]."""
    rotaries = [module for module in model.modules() if hasattr(module, "cos_sin_cache")]
    (table,) = {id(each.cos_sin_cache): each.cos_sin_cache for each in rotaries}.values()
    return table.detach().clone()


@pytest.mark.slow
def test_yarn_frequencies_are_those_of_vllm(tmp_path):
    changes = [
        {},
        {"factor": 2.5, "attention_factor": 1.5},
        {"mscale": 1.0, "mscale_all_dim": 0.707, "truncate": False},
        {"beta_fast": 4.0, "beta_slow": 2.0, "attention_factor": None},
    ]
    cases = [
        (
            servable_model(
                tmp_path / f"{family}-{number}",
                family,
                max_position_embeddings=160,
                rope_parameters=SHORT | change | {"rope_theta": 10_000.0},
            ),
            EngineDims(tensor=1),
        )
        for number, (family, change) in enumerate(product(("qwen2", "qwen3"), changes))
    ]
    for (folder, _), (table,) in zip(cases, read_in_workers(cases, cosines_and_sines), strict=True):
        shape = read_shape(folder)
        scaling = shape.rope_scaling
        assert len(table) >= shape.max_position_embeddings
        frequencies = yarn_frequencies(plain_frequencies(shape.head_dim, 1e4), 1e4, scaling)
        angles = torch.arange(len(table))[:, None] * frequencies
        expected = scaling["attention_factor"] * torch.cat([angles.cos(), angles.sin()], dim=-1)
        torch.testing.assert_close(table, expected, rtol=0, atol=1e-4)
