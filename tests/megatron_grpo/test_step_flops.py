"""An optimizer step executes hardly more matrix-product FLOPs than its sequences need."""

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from benchmarks.peers import step_flops
from helpers.ranks.processes import CONTEXT


@pytest.mark.slow
def test_a_step_executes_the_flops_that_its_sequences_need(tmp_path: Path) -> None:
    """The same gradient without extra passes, padding or heads, up to 2%."""
    folders = [tmp_path / side for side in ("ours", "limit")]
    found = []
    for folder in folders:
        folder.mkdir()
        with ProcessPoolExecutor(1, mp_context=CONTEXT) as pool:
            found.append(pool.submit(step_flops.SIDES[folder.name], folder).result(timeout=200))
    ours, limit = (figures[step_flops.EXCESS] for figures in found)
    assert limit == pytest.approx(1, abs=1e-4)  # transformers also computes RoPE
    # Not 1: the head, which keeps no logits, runs its product once more in the backward.
    assert 1.001 <= ours <= 1.02
    assert "every gradient within" in step_flops.compare(*folders)
