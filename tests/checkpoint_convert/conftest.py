"""Models that several test files convert. Tests must not write to their folders."""

import pytest

from helpers.models import CONFIGS, tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="session")
def seven_layer_models(tmp_path_factory):
    """Model folders by family. No pipeline divides seven layers; every other model is tied, and has
    a single key-value head."""
    return {
        family: tiny_model(
            tmp_path_factory.mktemp(family),
            family,
            tied=number % 2 == 1,
            num_hidden_layers=7,
            num_key_value_heads=1 if number % 2 else 2,
        )
        for number, family in enumerate(CONFIGS)
    }
