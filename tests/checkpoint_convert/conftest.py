"""Models that several test files convert. Tests must not write to their folders."""

import pytest

from helpers.models import CONFIGS, tiny_model


@pytest.fixture(scope="session")
def seven_layer_models(tmp_path_factory):
    """Model folders by (family, tied). No pipeline divides seven layers; tied models have a single
    key-value head."""
    return {
        (family, tied): tiny_model(
            tmp_path_factory.mktemp(family),
            family,
            tied=tied,
            num_hidden_layers=7,
            num_key_value_heads=1 if tied else 2,
        )
        for family in CONFIGS
        for tied in (False, True)
    }
