import re
from pathlib import Path

import pytest

from megatron_grpo.reporting.runlog import SYMPTOMS, Symptoms

PAGE = Path(__file__).parents[3] / "docs" / "symptoms.md"
STEPS = {
    "frac_reward_zero_std": ([0.5, 0.5, 0.5, 0.5], [0.8, 0.9, 1.0]),
    "completions/clipped_ratio": ([0.4] * 4, [0.5] * 3),
    "entropy": ([2.0, 1.0, 0.3, 0.3], [0.09, 0.09, 0.09]),
    "completions/mean_length": ([100.0, 200, 290, 290], [600.0] * 3),
    "rollout/logprob_gap_mean": ([0.01, 0.01, 0.01, 0.04], [0.06] * 3),
    "tokens_per_second": ([900.0, 900, 900, 400], [290.0] * 3),
}
"""Metrics of steps that show nothing, and of those that follow and do."""


@pytest.mark.parametrize("symptom", SYMPTOMS, ids=lambda symptom: symptom.metric)
def test_a_pattern_is_told_once_and_explained(symptom, capsys: pytest.CaptureFixture[str]) -> None:
    symptoms, (healthy, ill) = Symptoms(), STEPS[symptom.metric]
    for step, value in enumerate(healthy):
        symptoms.check(step, {symptom.metric: value})
    assert capsys.readouterr().err == ""
    for step, value in enumerate(ill * 2):
        symptoms.check(step, {symptom.metric: value})
    [line] = capsys.readouterr().err.splitlines()
    heading = line.rpartition("#")[2]
    headings = re.findall(r"^## (.+)$", PAGE.read_text(), re.MULTILINE)
    assert heading in {text.lower().replace(" ", "-") for text in headings}
    section = PAGE.read_text().lower().partition(heading.replace("-", " "))[2].partition("\n## ")[0]
    assert f"🔔 `{symptom.metric}`" in section
