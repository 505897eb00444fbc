"""A run may change the release of Megatron-Core, and the layout at the same time.

`make test-older` sets OTHER_PYTHON, which names the environment with the other release.
"""

from contextlib import closing

import pytest
import torch

from helpers.models import tiny_model
from helpers.releases import OTHER_PYTHON, Elsewhere, gradients
from parallel import ParallelDims

pytestmark = [
    pytest.mark.skipif(not OTHER_PYTHON, reason="needs OTHER_PYTHON"),
    pytest.mark.timeout(600),
]
CASES = [
    ("qwen3", ParallelDims(tensor=2, pipeline=2), ParallelDims(context=2, data=2)),
    ("qwen3_moe", ParallelDims(data=2, expert=2), ParallelDims(tensor=2, expert_tensor=1)),
    ("deepseek_v3", ParallelDims(tensor=2), ParallelDims(pipeline=2)),
]


@pytest.fixture(scope="module")
def there():
    with closing(Elsewhere()) as elsewhere:
        yield elsewhere.gradients


@pytest.mark.parametrize("begins_here", [True, False], ids=["to", "from"])
@pytest.mark.parametrize(("family", "first", "second"), CASES, ids=lambda case: str(case))
def test_a_run_goes_on_with_another_release_at_another_layout(
    tmp_path, there, family, first, second, begins_here
):
    before, after = (gradients, there) if begins_here else (there, gradients)
    model = tiny_model(tmp_path / "model", family)
    steps = before(model, first, None, tmp_path / "first")
    resumed = after(model, second, tmp_path / "first", tmp_path / "second")
    assert steps.keys() == resumed.keys()
    for name, gradient in steps.items():
        torch.testing.assert_close(resumed[name], gradient, rtol=1e-4, atol=1e-5, msg=name)
    # What the second has saved of what it loaded is, bit for bit, what the first had saved.
    weights = before(model, first, tmp_path / "second", tmp_path / "third")
    assert all(torch.equal(weights[name], gradient) for name, gradient in steps.items())
