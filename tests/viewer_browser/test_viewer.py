"""The page of `megatron-grpo view` in a headless Chromium: from the server, and from a file."""

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import pytest

from helpers.runs.browser import Browser
from helpers.runs.run_dirs import completions, metrics, viewed, write_run
from megatron_grpo.batch.schedule import BatchSchedule
from megatron_grpo.viewer.html_file import write_html
from megatron_grpo.viewer.run import RunFiles


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunFiles]:
    folder = tmp_path_factory.mktemp("runs")
    return {
        "math": RunFiles(write_run(folder / "math")),
        "faster": RunFiles(write_run(folder / "faster", lr=3e-6, seed=1)),
    }


@pytest.fixture(scope="module")
def address(runs: dict[str, RunFiles]) -> Iterator[str]:
    with viewed(runs) as port:
        yield f"http://127.0.0.1:{port}/"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(params=["server", "file"])
def page(
    request: pytest.FixtureRequest,
    browser: Browser,
    runs: dict[str, RunFiles],
    address: str,
    tmp_path: Path,
) -> Iterator[Browser]:
    """The page, open at the newest step; afterwards nothing has failed or come from elsewhere."""
    home = address
    if request.param == "file":
        write_html(runs, tmp_path / "runs.html")
        home = (tmp_path / "runs.html").as_uri()
    browser.open(home)
    browser.wait_for("document.querySelectorAll('#plots .shapelayer').length")
    browser.wait_for("document.querySelector('#pane h2')?.textContent.startsWith('step 12,')")
    yield browser
    assert browser.problems() == []
    assert {u for u in browser.requested() if not u.startswith((home, "data:", "blob:"))} == set()


def go_to(page: Browser, step: int) -> None:
    page.type("#step", str(step))
    page.wait_for(f"document.querySelector('#pane h2')?.textContent.startsWith('step {step},')")


def rows(runs: dict[str, RunFiles], name: str, step: int) -> list[dict]:
    path = runs["math"].run_dir / f"{name}.jsonl"
    return [row for row in map(json.loads, path.read_text().splitlines()) if row["step"] == step]


def test_a_click_on_a_curve_and_the_arrow_keys_select_a_step(page):
    assert page.texts("#plots figcaption")[0] == "reward"
    page.wait_for("document.querySelector('#plots .nsewdrag')")
    page.move_to("#plots .nsewdrag")
    page.wait_for("document.querySelector('#plots .hoverlayer').children.length")
    page.click("#plots .nsewdrag")
    page.wait_for("!byId('follow').checked")
    step = page.run("state.step")
    assert step in (6, 7)  # in the middle of 12
    page.wait_for(f"document.querySelector('#pane h2').textContent.startsWith('step {step},')")
    page.press("ArrowRight")
    page.wait_for(f"document.querySelector('#pane h2').textContent.startsWith('step {step + 1},')")
    assert page.run("document.querySelector('#plots .plot').layout.shapes[0].x0") == step + 1


def test_worst_completion_shows_its_clipped_tokens(page, runs):
    go_to(page, 5)
    page.choose("#sort", "worst")
    logged = rows(runs, "completions", 5)
    least = min(row["reward"] for row in logged if row["reward"] is not None)
    groups = page.run(
        "[...document.querySelectorAll('#list .group')].map((g) => "
        "[...g.querySelectorAll('.row')].map((e) => e.row.reward ?? 99))"
    )
    assert sum(map(len, groups)) == len(logged)
    assert groups == sorted(map(sorted, groups), key=lambda rewards: rewards[0])
    assert groups[0][0] == least
    page.choose("#sort", "best/exact")
    exact = page.run("foundRows().map((row) => row.rewards.exact ?? -1)")  # -1: failed
    assert exact == sorted(exact, reverse=True) and {0.0, 1.0} <= {*exact}
    page.choose("#sort", "worst")
    page.click("#list .row:has(.tokens)")
    read = page.run("[state.row.prompt_index, state.row.sample_index]")
    assert page.run("state.row.reward") == least
    [row] = [
        row for row in rows(runs, "tokens", 5) if [row["prompt_index"], row["sample_index"]] == read
    ]
    page.wait_for(f"document.querySelectorAll('#pane .token').length === {len(row['tokens'])}")
    sides = page.run("[...document.querySelectorAll('#pane .token')].map((t) => t.dataset.clipped)")
    names = {-1: "low", 0: None, 1: "high"}
    assert sides == [names[side] for side in row["clipped"]] and "high" in sides
    assert [text.replace("↵", "") for text in page.texts("#pane .token")] == row["tokens"]
    colour_of_clipped = (
        "[...document.querySelectorAll('#pane .token[data-clipped=high]')]"
        ".map((t) => t.style.backgroundColor)"
    )
    for colouring in ("clipped", "ratio"):
        page.choose("#colouring", colouring)
        page.wait_for(f"{colour_of_clipped}.every((c) => c.startsWith('rgba(214, 69, 60, 0.8'))")
    page.move_to("#pane .token[data-clipped=high]")
    page.wait_for("!byId('values').hidden")
    facts = dict(zip(page.texts("#values th"), page.texts("#values td"), strict=True))
    assert float(facts["ratio"]) == 1.35 and facts["clipped"] == "1"


@pytest.mark.parametrize("page", ["server"], indirect=True)
def test_completions_are_found_by_text_length_and_fate(page, runs):
    go_to(page, 5)
    logged = rows(runs, "completions", 5)

    def count(holds) -> str:
        return f"{sum(map(holds, logged))} of {len(logged)}"

    def listed(expected: str) -> None:
        page.wait_for(f"byId('count').textContent.startsWith({json.dumps(expected)})")

    page.type("#search", "check this ONCE more")
    listed(count(lambda row: "check this once more" in row["completion"]))
    page.type("#search", "")
    page.type("#min-length", "20")
    listed(count(lambda row: row["num_tokens"] >= 20))
    page.type("#min-length", "")
    page.type("#max-reward", "0.5")
    listed(count(lambda row: row["reward"] is not None and row["reward"] <= 0.5))
    page.type("#max-reward", "")
    page.choose("#finish", "length")
    listed(count(lambda row: row["finish_reason"] == "length"))
    page.choose("#finish", "")
    for box, holds in {
        "failed": lambda row: row["reward"] is None,
        "stale": lambda row: row["policy_version"] < row["step"] - 1,
    }.items():
        page.click(f"#{box}")
        listed(count(holds))
        page.click(f"#{box}")
    listed("16 of 16")


def test_a_prompt_is_compared_at_two_steps(page):
    go_to(page, 8)
    page.click("#find-steps")
    page.wait_for("document.querySelectorAll('#found-steps .chip').length")
    assert page.texts("#found-steps .chip") == ["2", "5", "11"]
    page.click("#found-steps .chip:nth-child(2)")
    page.wait_for("document.querySelector('#other-pane .token, #other-pane .completion')")
    ours, theirs = page.texts("#panes h2")
    assert (ours, theirs) == ("step 8, prompt 8", "step 5, prompt 8")
    assert page.texts("#pane .text")[0] == page.texts("#other-pane .text")[0]  # the question
    page.type("#other-step", "7")
    page.wait_for("byId('other-pane').textContent.includes('no completions of this prompt')")


def test_a_prompt_is_compared_in_two_runs(page):
    go_to(page, 8)
    page.choose("#other-run", "1")
    page.click("#find-steps")
    page.wait_for("document.querySelectorAll('#found-steps .chip').length")
    assert page.texts("#found-steps .chip") == ["2", "5", "8", "11"]
    page.click("#found-steps .chip:nth-child(3)")
    page.wait_for("document.querySelector('#other-pane .token, #other-pane .completion')")
    assert page.texts("#panes h2") == ["step 8, prompt 8", "faster, step 8, prompt 8"]
    chips = "#{} .chips .chip"
    ours, theirs = (page.texts(chips.format(pane)) for pane in ("pane", "other-pane"))
    assert len(ours) == len(theirs) == 4 and ours != theirs


def test_runs_are_listed_and_one_is_opened(page):
    listed = page.texts("#runs tbody tr")
    assert [row[:4] for row in listed] == ["math", "fast"] and listed[1].startswith("faster12")
    page.click("#runs tr:first-child input")
    page.wait_for("document.title === 'faster: megatron-grpo'")
    page.wait_for("document.querySelector('#pane h2')?.textContent.startsWith('step 12,')")
    traces = "document.querySelector('[data-metric=reward] .plot').data"
    assert page.run(f"{traces}.map((trace) => trace.name)") == ["faster"]
    assert page.run("state.runs[0].config.optimizer.lr") == 3e-6


def test_the_best_of_all_steps_is_found_and_saved(page, runs, tmp_path):
    path = runs["math"].run_dir / "completions.jsonl"
    logged = [json.loads(line) for line in path.read_text().splitlines()]
    best = max(row["reward"] for row in logged if row["reward"] is not None)
    rights = [row for row in logged if row["reward"] == best]
    page.click("#all-steps")
    page.choose("#sort", "best")
    page.type("#search", "WHAT IS")
    page.wait_for("byId('count').textContent.includes(' in all steps')")
    page.wait_for(f"state.row?.step === {rights[0]['step']} && state.row.reward === {best}")
    assert page.run("[state.row.prompt_index, state.row.sample_index]") == [
        rights[0]["prompt_index"],
        rights[0]["sample_index"],
    ]
    page.type("#min-reward", str(best))
    page.wait_for(f"byId('count').textContent.startsWith('{len(rights)} in all steps')")
    bars = "[...document.querySelector('[data-field=reward] .plot').calcdata[0]]"
    assert page.run(f"{bars}.reduce((sum, bar) => sum + bar.s, 0)") == len(rights)
    page.send("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    page.click("#download")
    saved, end = tmp_path / "math.jsonl", time.monotonic() + 10
    while not saved.exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert [json.loads(line) for line in saved.read_text().splitlines()] == rights
    go_to(page, 5)  # shows the step again
    assert not page.run("byId('all-steps').checked")


def test_questions_stand_above_completions_and_failures_in_them(page, runs):
    go_to(page, 6)
    row = rows(runs, "completions", 6)[0]
    assert page.texts("#list q")[0] == row["messages"][0]["content"]
    page.click("#failed")
    page.wait_for("document.querySelector('#pane .failure')")
    assert page.texts("#pane .failure") == [rows(runs, "completions", 6)[3]["failure"]]


def test_turns_of_a_dialogue_are_distinguishable(page):
    go_to(page, 5)
    page.click("#list .group:nth-child(2) .row:has(.tokens)")
    page.wait_for("document.querySelectorAll('#pane .turn').length === 4")
    asked, said, told, answered = page.texts("#pane .turn .role")
    assert asked == "user"
    assert said.startswith("assistant, calls add, reward 0")
    assert said.endswith("branch 0")
    assert (told, answered[:9], answered[-8:]) == ("tool, branch 0", "assistant", "branch 1")
    assert "calls1" in page.texts("#pane .facts div")  # a metric of the agent
    assert page.texts("#pane .turn.calling .text")[0].startswith("<tool>add(")
    assert "The result is" in page.texts("#pane .turn.tool .text")[0]
    assert page.run(
        "[...document.querySelectorAll('#pane .token')].every((t) =>"
        " t.classList.contains('masked') === Boolean(t.closest('.environment')))"
    )


def test_evaluations_timeline_and_configs_have_tables(page):
    page.click("[data-tab=config]")
    rows = page.texts("#config tbody tr")
    assert "optimizer.lr0.0000010.000003" in rows[0].replace("1e-6", "0.000001").replace(
        "3e-6", "0.000003"
    )
    assert len(rows) == 2  # the rate and the folder
    page.click("[data-tab=timeline]")
    page.wait_for("document.querySelectorAll('#timeline .bars .point').length >= 15")
    page.click("[data-tab=evaluations]")
    assert len(page.texts("#evaluations tbody tr")) == 6
    page.click("#evaluations tbody tr:nth-child(2)")
    page.wait_for("byId('count').textContent.startsWith('8 of 8')")
    assert page.run("[state.step, state.row.step, byId('kind').value]") == [
        8,
        8,
        "eval_completions",
    ]


@pytest.mark.parametrize("page", ["server"], indirect=True)
def test_the_whole_text_of_a_shortened_completion_can_be_read(page, runs):
    go_to(page, 5)
    page.type("#search", "What is 41 + 61")  # no dialogue
    page.choose("#sort", "longest")
    page.click("#list .row:has(.tokens)")
    page.wait_for("byId('pane').textContent.includes('sampled tokens were recorded')")
    assert len(page.texts("#pane .token")) == 32
    [whole] = page.texts("#pane .completion")
    assert whole in {row["completion"] for row in rows(runs, "completions", 5)}


@pytest.mark.parametrize("page", ["server"], indirect=True)
def test_a_step_that_repeats_a_generation_shows_its_completions(page):
    sizes = {"steps_per_generation": 2, "num_iterations": 3}
    schedule = BatchSchedule(num_generations=4, generation_batch_size=16, **sizes)
    first: dict[tuple[int, int], int] = {}
    expected = []
    for step in range(1, 15):
        cursor = schedule.cursor(step - 1)
        expected.append(first.setdefault((cursor.generation, cursor.minibatch), step))
    page.run(f"state.runs[0].config.grpo = {json.dumps(sizes)}")
    assert page.run("Array.from({length: 14}, (_, k) => stepOfCompletions(k + 1))") == expected


@pytest.mark.parametrize("page", ["server"], indirect=True)
def test_a_metric_is_chosen(page):
    page.click("#chooser summary")
    page.type("#metric-search", "staleness")
    page.click("#metric-groups label:not([hidden]) input")
    page.wait_for(
        "document.querySelector('[data-metric=\"rollout/staleness_mean\"] .scatterlayer')"
    )
    traces = "document.querySelector('[data-metric=reward] .plot').data"
    assert page.run(f"{traces}.map((trace) => trace.name)") == ["math", "faster"]
    page.type("#smoothing", "4")
    page.wait_for(f"{traces}.length === 4")
    raw, means = page.run(f"{traces}.slice(0, 2).map((trace) => [...trace.y])")
    assert means == pytest.approx([fmean(raw[max(k - 3, 0) : k + 1]) for k in range(len(raw))])
    page.click("#chooser summary")


def test_a_running_run_is_followed(browser, tmp_path):
    run_dir = write_run(tmp_path / "run", num_steps=3)
    with viewed({"run": RunFiles(run_dir)}) as port:
        browser.open(f"http://127.0.0.1:{port}/")
        shows = "document.querySelector('#pane h2')?.textContent.startsWith('step {},')"
        browser.wait_for(shows.format(3))
        rows = completions(4, random.Random(4))
        with (run_dir / "completions.jsonl").open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        with (run_dir / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(metrics(4, rows, random.Random(4))) + "\n")
        browser.wait_for(shows.format(4))
        browser.wait_for(
            "document.querySelector('[data-metric=reward] .plot').data[0].x.length === 4"
        )
        assert browser.problems() == []
        browser.open("about:blank")
