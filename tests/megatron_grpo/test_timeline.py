import json
from contextlib import closing
from pathlib import Path
from typing import Any

from megatron_grpo.timing import ROLLOUT, TRAINER, PhaseTimer, Timeline


def opened(path: Path) -> list[dict[str, Any]]:
    """The timeline as read by a viewer that tolerates a missing closing bracket."""
    return json.loads(path.read_text().rstrip().rstrip(",") + "]")


def test_every_phase_is_in_the_file_as_soon_as_it_is_over(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    timeline = Timeline(path)  # nobody closes it: the run is killed
    timeline.step = 3
    timer = PhaseTimer(lambda phase: None, timeline.add_step)
    with timer.phase("eval", "score"):
        pass
    timeline.add("generate", 1.5, 0.25, ROLLOUT, generation=2, policy_version=1)
    *names, score, generate = opened(path)
    assert [(each["tid"], each["args"]["name"]) for each in names] == [
        (TRAINER, "trainer"),
        (ROLLOUT, "rollout"),
    ]
    assert (score["name"], score["tid"], score["args"]) == ("eval_score", TRAINER, {"step": 3})
    assert generate == {
        "name": "generate",
        "ph": "X",
        "ts": 1_500_000,
        "dur": 250_000,
        "pid": 0,
        "tid": ROLLOUT,
        "args": {"generation": 2, "policy_version": 1},
    }


def test_a_resumed_run_goes_on_behind_the_line_that_the_last_one_has_not_finished(
    tmp_path: Path,
) -> None:
    path = tmp_path / "timeline.json"
    for step in (1, 2):
        with closing(Timeline(path)) as timeline:
            timeline.add("train", float(step), 0.5, TRAINER, step=step)
        with path.open("a") as file:
            file.write('{"name": "tr')
    with closing(Timeline(path)):
        pass
    events = opened(path)
    assert [event["args"].get("step") for event in events] == [None, None, 1, 2]
