"""An optimizer step executes hardly more matrix-product FLOPs than its sequences need."""

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from benchmarks.peers import step_flops
from helpers.ranks import CONTEXT


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory):
    """Figures and folder of a side, in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=CONTEXT) as pool:

        def measure(side: str) -> tuple[dict[str, float], Path]:
            folder = tmp_path_factory.mktemp(side)
            return pool.submit(step_flops.SIDES[side], folder).result(timeout=200), folder

        yield measure


@pytest.fixture(scope="module")
def ours(measured):
    return measured("ours")


def test_what_is_executed_is_what_every_sequence_needs_by_itself(measured, ours):
    """The same gradient, with no pass, no padding and no head that is not needed: but for 2%."""
    figures, folder = ours
    alone, folder_alone = measured("limit")
    assert alone[step_flops.EXCESS] == pytest.approx(1, abs=1e-4)  # transformers also turns: RoPE
    # Not 1: the head, which keeps no logits, runs its product once more in the backward.
    assert 1.001 <= figures[step_flops.EXCESS] <= 1.02
    assert "every gradient within" in step_flops.compare(folder, folder_alone)


@pytest.mark.slow
def test_trl_executes_several_times_as_much_for_the_same_gradient(measured, ours):
    figures, folder = measured("trl")
    assert figures[step_flops.FLOPS] > 2 * ours[0][step_flops.FLOPS]
    assert "every gradient within" in step_flops.compare(ours[1], folder)
