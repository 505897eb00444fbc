"""Checks of the documentation: links resolve, commands exist, and the arithmetic is right."""

import ast
import contextlib
import io
import json
import re
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from importlib import import_module
from operator import attrgetter
from pathlib import Path

import pytest
import yaml

from checkpoint_convert import megatron_layout, read_shape
from docs import make_api, make_cli, make_compatibility, make_models
from helpers.models.published import write_config
from megatron_grpo.batch.schedule import BatchSchedule
from megatron_grpo.cli import app
from megatron_grpo.config.file import load_config
from megatron_grpo.planning.block import kernels_of
from megatron_grpo.planning.layer_kinds import layer_kinds
from megatron_grpo.planning.precision import precision
from megatron_grpo.timing import WAIT

ROOT = Path(__file__).parents[1]
FORMULAS = ROOT / "docs" / "formulas.md"
PACKAGES = ["megatron_grpo", "checkpoint_convert", "parallel"]
DOCUMENTS = ["README.md", "CONTRIBUTING.md", *(f"docs/{f.name}" for f in ROOT.glob("docs/*.md"))]


def headings(file: Path) -> set[str]:
    """Anchors of a page's headings."""
    found = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in found}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_and_commands_exist(document):
    path, text = ROOT / document, (ROOT / document).read_text()
    for target, _, heading in re.findall(r"\]\(([^)#\s]*)(#([^)]+))?\)", text):
        if "://" not in target:
            file = path.parent / target if target else path
            assert file.exists(), target
            assert not heading or heading in headings(file), (target, heading)
    for config in re.findall(r"\bconfigs/\w+\.yaml", text):
        assert (ROOT / config).exists(), config
    commands = {command.name or command.callback.__name__ for command in app.registered_commands}
    assert set(re.findall(r"megatron-grpo (?=[a-z])(\w+)", text)) <= commands
    assert not re.search(r"^\s*\+ ", text, re.MULTILINE), "Markdown takes it for a bullet"


def test_the_config_in_the_readme_is_legal(tmp_path):
    file = tmp_path / "config.yaml"
    (shown,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    file.write_text(shown)
    BatchSchedule.of(load_config(file).grpo)


SHOWN = [
    (page.name, number, shown)
    for page in sorted(ROOT.glob("docs/*.md"))
    for number, shown in enumerate(re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL))
]


@pytest.mark.parametrize(("page", "number", "shown"), SHOWN, ids=lambda value: str(value)[:12])
def test_config_sections_in_a_page_are_legal(page, number, shown):
    sections = yaml.safe_load(shown).items()
    options = [
        f"{name}.{key}={json.dumps(x)}" for name, keys in sections for key, x in keys.items()
    ]
    load_config(ROOT / "configs" / "tiny_cpu.yaml", options)


def test_the_tables_of_faults_name_existing_tests():
    tests = {
        path: re.findall(r"^ *(?:async )?def test_(\w+)", path.read_text(), re.MULTILINE)
        for path in ROOT.glob("tests/**/test_*.py")
    }
    all_names = [name for names in tests.values() for name in names]
    tables = re.findall(
        r"^\|[^|\n]*\|[^|\n]*\|([^|\n]*)\|", (ROOT / "docs/faults.md").read_text(), re.MULTILINE
    )
    named = re.findall(r"`([^`]+)`", "".join(tables))
    assert len(named) > 150
    for each in named:
        if each.endswith(".py"):
            assert len([path for path in tests if path.match(f"**/{each}")]) == 1, each
        else:
            assert any(each in name for name in all_names), each


def test_the_tree_of_the_code_names_existing_files():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    tree = text.partition("## Where everything is")[2].partition("\n## ")[0]
    files = {file.name for folder in PACKAGES for file in (ROOT / folder).rglob("*")}
    named = {name for name in re.findall(r"[\w*]+\.(?:py|c)\b", tree) if "*" not in name}
    assert named and named <= files


def published_methods() -> dict[str, dict[str, object]]:
    """The options of each row of the table in docs/algorithms.md."""
    text = (ROOT / "docs" / "algorithms.md").read_text()
    rows = text.partition("## Published methods")[2].partition("\n## ")[0].splitlines()
    cells = [row.strip("|").split("|") for row in rows if row.startswith("|")][2:]
    return {
        method.strip(): yaml.safe_load("\n".join(re.findall(r"`(\w+: [^`]+)`", options)))
        for method, options in cells
    }


@pytest.mark.parametrize("method", published_methods())
def test_options_of_a_published_method_are_compatible(method):
    options = {"generation_batch_size": 64, **published_methods()[method]}
    rewards = ["reward.functions=[math_answer]", "environment.name=game.py:Game"]
    load_config(ROOT / "configs" / "tiny_cpu.yaml", [f"grpo={json.dumps(options)}", *rewards])


def test_options_for_generations_ahead_are_compatible():
    text = (ROOT / "docs" / "algorithms.md").read_text()
    text = text.partition("## Asynchronous training")[2]
    found = []
    for row in re.findall(r"^\| (\d) \|(.*?)\|(.*?)\|", text, re.MULTILINE):
        found.append(int(row[0]))
        rollout, grpo = (re.findall(r"`(\w+): ([^`]+)`", cell) for cell in row[1:])
        options = [f"rollout.{key}={value}" for key, value in rollout]
        options += [f"grpo.{key}={value}" for key, value in grpo]
        cfg = load_config(ROOT / "configs" / "tiny_cpu.yaml", options)
        assert cfg.rollout.max_staleness == found[-1]
    assert found == [1, 4, 8]


def metrics_of_the_page() -> set[str]:
    """Names in the first columns of docs/metrics.md; a placeholder like `{name}` becomes `*`."""
    text = (ROOT / "docs" / "metrics.md").read_text()
    cells = re.findall(r"^\| (`[^|]*) \|", text, re.MULTILINE)
    names = {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    return {re.sub(r"{\w+}", "*", name) for name in names}


def text_of(node: ast.AST | None) -> str:
    """The text of a literal, with `*` for each value of an f-string."""
    match node:
        case ast.Constant(value=str(value)):
            return value
        case ast.JoinedStr(values=parts):
            return "".join(text_of(part) or "*" for part in parts)
    return ""


def tables_of_the_code() -> Iterator[set[str]]:
    """The keys of each table of a run, and the names of phases as metrics."""
    for file in sorted((ROOT / "megatron_grpo").rglob("*.py")):
        if file.parent.name == "doctor":  # its names with slashes are file names
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Dict(keys=keys):
                    yield {*map(text_of, keys)}
                case ast.DictComp(key=key) | ast.Subscript(slice=key, ctx=ast.Store()):
                    yield {text_of(key)}
                case ast.Call(func=ast.Attribute(attr="phase"), args=[phase, *_]):
                    yield {f"time/{text_of(phase)}"}


def is_among(name: str, names: Iterable[str]) -> bool:
    return any(fnmatchcase(name, each) or fnmatchcase(each, name) for each in names)


def test_the_page_of_metrics_names_exactly_the_metrics_of_the_code():
    page, has_slash = metrics_of_the_page(), re.compile(r"[a-z_*]+(/[\w*]*)+").fullmatch
    page |= {name.removeprefix("eval/") for name in page}
    tables = [{key for key in keys if key.strip("*")} for keys in tables_of_the_code()]
    written = set().union(*(keys for keys in tables if any(map(has_slash, keys))))
    golden = json.loads((ROOT / "tests" / "golden" / "runs.json").read_text())["values"]
    written |= {
        name for run in golden.values() for step in run["metrics"].values() for name in step
    }
    assert len(written) > 80
    written = {f"agent/{name}" if name.startswith("tool/") else name for name in written}
    written -= {"time/", "time/log"}  # names that are no literals; a phase that ends too late
    assert {name for name in written if not is_among(name.removeprefix("eval/"), page)} == set()
    keys = set().union(*tables) - {"time/*"} | {f"time/{WAIT}", "time/score"}
    keys |= {f"agent/{key}" for key in keys if key.startswith("tool/")}
    assert {name for name in page if not is_among(name.removeprefix("eval/"), keys)} == set()


def test_the_page_for_users_of_other_trainers_names_existing_keys_and_metrics():
    keys = re.findall(r"^\| `([\w.]+)`", (ROOT / "docs" / "config.md").read_text(), re.MULTILINE)
    known = {*keys, *metrics_of_the_page(), "rollout.vllm", "eval/*/mean@*"}
    sections = (ROOT / "docs" / "coming-from.md").read_text().split("\n## ")[1:-1]
    for section in sections:
        prefix = "grpo." if section.startswith("Loss") else ""
        cells = re.findall(r"\| ([^|]*) \|$", section, re.MULTILINE)[1:]
        names = {name for cell in cells for name in re.findall(r"`([a-z][^`:\s]+)", cell)}
        assert len(names) >= 5
        assert {prefix + re.sub(r"{\w+}", "*", name) for name in names} - known == set()


@pytest.fixture(scope="module")
def arithmetic() -> tuple[dict[str, object], str, str]:
    """Variables and output of the code in docs/formulas.md, and the output that the page shows."""
    text = FORMULAS.read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (shown,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    variables, output = {}, io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(code, variables)
    return variables, output.getvalue(), shown


def test_code_in_the_page_of_formulas_prints_the_shown_output(arithmetic):
    _, output, shown = arithmetic
    assert output == shown


def test_the_formula_for_parameters_counts_a_ranks_parameters(arithmetic, tmp_path):
    shape = read_shape(write_config(tmp_path, "Llama-3.3-70B"))
    dims = load_config(ROOT / "configs" / "grpo_70b.yaml").dims
    layout = megatron_layout(shape, dims, dims.coordinates(0), transformer_engine=True)
    assert layout.num_elements == arithmetic[0]["P"]


def formula_rows() -> list[tuple[str, str, str]]:
    """(heading of the value's column, formula, value) of each row with both."""
    found, head, before = [], [], []
    for line in FORMULAS.read_text().partition("## Memory of one rank")[2].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if set(line) == {"|", "-"}:
            head = before
        before = cells
        for number, cell in enumerate(cells[1:], start=1):
            formula = re.search(r"`([^`]+)`", cells[number - 1])
            if re.fullmatch(r"[\d,.]+( GB| / \w+)?", cell) and formula and number > 1:
                found.append((head[number], formula[1], cell))
    return found


def value_of(formula: str, variables: dict[str, object]) -> float:
    """Evaluate `2 P / (dp cp)`: terms that follow each other are multiplied."""
    tokens = re.findall(r"\d+(?:\.\d+)?(?:e\d+)?|[A-Za-z]+|\S", formula.replace("^", "**"))
    text = " ".join(tokens).replace("* *", "**")
    return eval(re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", text), {}, variables)


# Sizes of the models in the columns of docs/formulas.md.
LATENTS = {"n": 128, "d": 192, "s": 64, "v": 128, "a": 1536, "r": 512, "L": 61}
DELTAS = {"n": 32, "g": 16, "a": 128, "v": 128, "c": 4, "m": 8192, "C": 64}
MAMBAS = {"n": 64, "g": 8, "a": 128, "v": 64, "c": 4, "m": 6144, "C": 64, "p": 10304}
SIZES = {
    "DeepSeek-V3": LATENTS,
    "Qwen3-Next-80B-A3B": DELTAS,
    "Nemotron 3 Nano": MAMBAS,
}


@pytest.mark.parametrize(("model", "formula", "shown"), formula_rows())
def test_a_formula_gives_the_value_next_to_it(arithmetic, model, formula, shown):
    variables = arithmetic[0] if model == "70B" else SIZES[model] | {"tp": 1, "w": 1}
    number, _, unit = shown.partition(" ")
    expected = float(number.replace(",", "")) * (1e9 if unit == "GB" else 1)
    assert value_of(formula, variables) == pytest.approx(expected, rel=0.01 if unit == "GB" else 0)


def test_the_functions_that_formulas_names_exist():
    modules = "|".join(path.stem for path in ROOT.glob("megatron_grpo/planning/[a-z]*.py"))
    named = set(re.findall(rf"`((?:{modules})\.[\w.]+)`", FORMULAS.read_text()))
    assert len(named) > 20
    for name in named:
        module, _, attribute = name.partition(".")
        attrgetter(attribute)(import_module(f"megatron_grpo.planning.{module}"))


@pytest.mark.parametrize(
    ("name", "module", "sizes"),
    [
        ("Qwen3-Next-80B-A3B", "linear attention", DELTAS),
        ("Nemotron-3-Nano-30B-A3B", "linear attention", MAMBAS),
        ("DeepSeek-V3", "latents", LATENTS),
    ],
)
def test_the_formula_for_activations_equals_the_plan(tmp_path, name, module, sizes):
    """Up to a float32 for each row of a norm, and for each head."""
    shape = read_shape(write_config(tmp_path, name))
    cfg = load_config(ROOT / "configs" / "grpo_8b.yaml", ["parallel.tensor_parallel_size=1"])
    kernels = kernels_of(cfg, precision(cfg))
    parts = [block.saved(kernels) for kind in layer_kinds(shape) for block in kind.blocks]
    saved = next(each for each in parts if module in each)
    counted = saved[module].num_bytes
    if module == "latents":
        counted += saved["core_attn"].num_bytes - 4 * (sizes["n"] + 2)
    shown = [formula for model, formula, _ in formula_rows() if SIZES.get(model) is sizes]
    assert counted == value_of(shown[0], sizes | {"tp": 1})


@pytest.mark.parametrize("name", ["Qwen3-235B-A22B", "Qwen3-30B-A3B"])
def test_the_formula_for_activations_of_experts_equals_the_plan(tmp_path, name):
    shape = read_shape(write_config(tmp_path, name))
    cfg = load_config(ROOT / "configs" / "grpo_8b.yaml", ["parallel.tensor_parallel_size=1"])
    [kind] = layer_kinds(shape)
    saved = kind.blocks[1].saved(kernels_of(cfg, precision(cfg)))["moe"]
    (formula,) = re.findall(r"MLP of experts.*? \| `(.*?)`", FORMULAS.read_text())
    sizes = {"e": shape.moe.experts_per_token, "E": shape.moe.num_experts}
    sizes |= {"f": shape.moe.intermediate_size, "h": shape.hidden_size, "tp": 1}
    assert saved.num_bytes == value_of(formula, sizes)


def test_the_overrides_of_quoted_commands_are_legal():
    text = "\n".join((ROOT / document).read_text() for document in DOCUMENTS)
    in_jobs = re.findall(r"(slurm/grpo_\w+\.sh)((?: [\w.]+=[^\s`]+)+)", text)
    in_demos = [("Makefile", args) for args in re.findall(r'make demo ARGS="([^"]+)"', text)]
    assert in_jobs
    assert in_demos
    for command, overrides in in_jobs + in_demos:
        config = re.search(r"configs/\w+\.yaml", (ROOT / command).read_text())
        load_config(ROOT / config[0], overrides.split())


def test_the_api_page_equals_the_docstrings_and_its_examples_run():
    assert make_api.PAGE.read_text() == make_api.page(), "run python docs/make_api.py"


def test_the_page_of_models_equals_the_checks():
    command = "run PYTHONPATH=.:tests python docs/make_models.py"
    assert make_models.PAGE.read_text() == make_models.page(), command


def test_the_page_of_commands_is_their_help():
    assert make_cli.PAGE.read_text() == make_cli.page(), "run PYTHONPATH=. python docs/make_cli.py"


def test_the_readme_is_a_screen_and_a_half():
    assert (ROOT / "README.md").stat().st_size <= 8_000


def test_the_table_of_features_equals_the_conflicts():
    command = "run PYTHONPATH=.:tests python docs/make_compatibility.py"
    assert make_compatibility.PAGE.read_text() == make_compatibility.page(), command
