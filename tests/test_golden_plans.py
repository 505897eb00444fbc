"""Plans of the shipped configs equal the recorded ones: figures within half a percent."""

import pytest

from golden import plans

RECORDED = plans.read()
REL = 0.005
"""Room for simpler formulas; `ATTAINABLE` of the peak is known to 14 %."""


@pytest.mark.parametrize("run", plans.RUNS, ids=lambda run: plans.title(run[0], run[1], run[3]))
def test_plan_job_gives_the_recorded_figures_and_verdict(run):
    recorded = RECORDED["plans"][plans.title(*run[:2], run[3])]
    assert plans.differences(plans.figures(plans.plan_of(*run)), recorded, REL) == []


@pytest.mark.parametrize(("name", "published", "num_gpus"), plans.SUGGESTED)
def test_suggest_gives_the_recorded_layouts(name, published, num_gpus):
    recorded = RECORDED["layouts"][plans.title(name, published, [f"on {num_gpus} GPUs"])]
    assert plans.layouts_of(name, published, num_gpus) == recorded
