import json
import re
from pathlib import Path

from helpers.runs.run_dirs import write_run
from megatron_grpo.viewer import html_file
from megatron_grpo.viewer.html_file import PAGE, plotly_file, write_html
from megatron_grpo.viewer.run import RunFiles


def embedded(page: str) -> list[dict]:
    element = re.search(r'<script type="application/json" id="embedded">(.*?)</script>', page)
    assert element
    return json.loads(element[1])


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_file_contains_the_whole_run_and_its_own_code(tmp_path):
    run_dir = write_run(tmp_path / "run")
    write_html({"math": RunFiles(run_dir)}, tmp_path / "run.html")
    page = (tmp_path / "run.html").read_text()
    [run] = embedded(page)
    assert run["name"] == "math"
    assert run["records"] == lines(run_dir / "metrics.jsonl")
    for name in ("completions", "eval_completions", "tokens"):
        assert run[name] == lines(run_dir / f"{name}.jsonl")
    assert run["config"]["optimizer"]["lr"] == 1e-6
    assert len(run["timeline"]) == len((run_dir / "timeline.json").read_text().splitlines()) - 1
    for file in [*PAGE.iterdir(), plotly_file()]:
        assert file.name == "index.html" or file.read_text().strip() in page


def test_the_file_loads_nothing(tmp_path):
    write_html({"math": RunFiles(write_run(tmp_path / "run"))}, tmp_path / "run.html")
    page = (tmp_path / "run.html").read_text()
    assert "default-src 'none'" in page[:600]
    without_plotly = page.replace(plotly_file().read_text(), "")
    assert not re.search(r"https?://|<script [^>]*src=|<link [^>]*stylesheet", without_plotly)


def test_a_completion_cannot_leave_its_element(tmp_path):
    run_dir = write_run(tmp_path / "run")
    text = "</script><script>alert(1)</script><!--"
    row = lines(run_dir / "completions.jsonl")[0] | {"completion": text}
    (run_dir / "completions.jsonl").write_text(json.dumps(row) + "\n")
    write_html({"math": RunFiles(run_dir)}, tmp_path / "run.html")
    page = (tmp_path / "run.html").read_text()
    assert "alert(1)</script>" not in page
    assert embedded(page)[0]["completions"][0]["completion"] == text


def test_a_large_run_is_cut_to_its_newest_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(html_file, "BYTES", 60_000)
    runs = {name: RunFiles(write_run(tmp_path / name)) for name in ("a", "b")}
    write_html(runs, tmp_path / "runs.html")
    for run in embedded((tmp_path / "runs.html").read_text()):
        steps = [row["step"] for row in run["completions"]]
        assert min(steps) > 1 and max(steps) == 12 and steps.count(min(steps)) == 16
        assert len(json.dumps(run["completions"])) <= 30_000
        assert len(run["records"]) == 12
