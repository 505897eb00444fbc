"""Results equal the recorded golden values (golden/record.py)."""

from collections.abc import Iterator

import pytest

from golden.record import (
    LAYOUTS,
    asynchronous_run,
    config_values,
    differences,
    layout_values,
    make_case,
    push_values,
    synchronous_run,
)
from helpers.engines.live import TestEngine, running_engine, served_model
from helpers.oracle.policies import layout_name
from helpers.oracle.train_steps import Case
from parallel import ParallelDims

pytestmark = pytest.mark.fast

# For machines that round differently. AVX2 and SSE differ from AVX-512 by up to 2e-6 of a
# gradient's norm; in a run, by 1e-5 of a metric, and by 5e-7 in a metric of rounding errors such
# as rollout/logprob_gap_max.
STEP = {"rel": 1e-5, "abs": 1e-9}
RUN = {"rel": 1e-4, "abs": 5e-6}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    return {
        family: make_case(tmp_path_factory.mktemp(family), family)
        for family in dict.fromkeys(family for family, _, _ in LAYOUTS)
    }


@pytest.mark.parametrize(
    ("family", "dims", "recipes"),
    LAYOUTS,
    ids=lambda value: layout_name(value) if isinstance(value, ParallelDims) else None,
)
def test_loss_gradients_and_logprobs_equal_the_recorded_ones(cases, family, dims, recipes):
    assert differences("layouts", layout_values(cases[family], family, dims, recipes), **STEP) == []


@pytest.fixture(scope="module")
def recorded_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestEngine]:
    """An engine of the model of the recorded runs."""
    folder = tmp_path_factory.mktemp("recorded")
    model = served_model(folder / "model", "qwen3", tied=True, intermediate_size=96)
    with running_engine("reference", model, folder / "logs") as engine:
        yield engine


@pytest.mark.long
def test_a_resumed_run_ends_with_the_recorded_weights_and_metrics(recorded_engine, tmp_path):
    assert differences("runs", synchronous_run(recorded_engine, tmp_path), **RUN) == []


@pytest.mark.long
def test_a_killed_asynchronous_run_ends_with_the_recorded_weights_and_metrics(
    recorded_engine, tmp_path
):
    assert differences("runs", asynchronous_run(recorded_engine, tmp_path), **RUN) == []


def test_a_push_has_the_recorded_checksums(tmp_path):
    assert differences("push", push_values(tmp_path)) == []


def test_the_config_has_the_recorded_keys_types_and_defaults():
    assert differences("config", config_values()) == []
