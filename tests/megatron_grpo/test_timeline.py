import json
import time
from contextlib import closing

from helpers.runs.train import read_timeline
from megatron_grpo.timing import ROLLOUT, TRAINER, PhaseTimer, Timeline


def test_timeline_has_each_phase_as_soon_as_it_is_over(tmp_path):
    path = tmp_path / "timeline.json"
    timeline = Timeline(path)  # nobody closes it: the run is killed
    timeline.step = 3
    timer = PhaseTimer(lambda phase: None, timeline.add_step)
    with timer.phase("eval", "score"):
        pass
    timeline.add("generate", 1.5, 0.25, ROLLOUT, generation=2, policy_version=1)
    text = path.read_text().removesuffix(",\n") + "]"  # viewers tolerate a missing bracket
    *names, score, generate = json.loads(text)
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


def test_phase_within_another_interrupts_it():
    """A hook, while a checkpoint is written: each second belongs to one phase."""
    entered = []
    timer = PhaseTimer(entered.append)
    with timer.phase("save"), timer.phase("hooks", "Slow"):
        time.sleep(0.05)
    assert entered == ["save", "hooks_Slow", "save", ""]
    seconds = timer.metrics()
    assert seconds["time/save"] < 0.05 <= seconds["time/hooks"] <= seconds["time/step"]
    assert seconds["time/save"] + seconds["time/hooks"] <= seconds["time/step"]


def test_timeline_goes_on_behind_an_unfinished_line_and_behind_its_end(tmp_path):
    path = tmp_path / "timeline.json"
    for step in (1, 2):  # killed
        Timeline(path).add("train", float(step), 0.5, TRAINER, step=step)
        with path.open("a") as file:
            file.write('{"name": "tr')
    for step in (3, 4):
        with closing(Timeline(path)) as timeline:
            timeline.add("train", float(step), 0.5, TRAINER, step=step)
        events = read_timeline(tmp_path)
        assert [e["args"]["step"] for e in events[2:]] == [*range(1, step + 1)]
