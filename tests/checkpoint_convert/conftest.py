"""Models that several test files convert. Tests must not write to their folders."""

import pytest

from helpers.models.tiny import CONFIGS, tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


TIED = (
    *("deepseek_v32", "glm4_moe", "gpt_oss", "ministral3", "mistral", "nemotron_h", "olmo3"),
    *("qwen2", "qwen3_5_text", "qwen3_moe"),
)
"""Families with a tied head, where they allow it, and a single key-value head."""
VARIANTS = {"qwen3": {"attention_bias": True}, "qwen3_moe": {"mlp_only_layers": [1, 4]}}


@pytest.fixture(scope="session")
def seven_layer_models(tmp_path_factory):
    """Model folders by family. No pipeline divides seven layers."""
    return {
        family: tiny_model(
            tmp_path_factory.mktemp(family),
            family,
            tied=family in TIED,
            num_hidden_layers=7,
            num_key_value_heads=1 if family in TIED else 2,
            **VARIANTS.get(family, {}),
        )
        for family in CONFIGS
    }
