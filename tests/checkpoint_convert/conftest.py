"""Models that several files convert. Nobody writes into their folders."""

import pytest

from models import CONFIGS, tiny_model


@pytest.fixture(scope="session")
def seven_layer_models(tmp_path_factory):
    """Folder by (family, tied): seven layers divide by no pipeline, and the tied ones have one
    key-value head for all queries."""
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
