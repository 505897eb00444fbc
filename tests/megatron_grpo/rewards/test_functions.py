import ast
import math
import re
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.config import reward
from megatron_grpo.config.reward import RewardFunction
from megatron_grpo.rewards import functions
from megatron_grpo.rewards.functions import NoScores, load_function

DEMO = Path(__file__).parents[3] / "demo" / "rewards.py"


def answer_of(name, completions, columns=None, finish_reasons=None, timeout=60, **arguments):
    function = load_function(RewardFunction(name=name, arguments=arguments))
    given = {
        "completions": completions,
        "prompts": ["prompt"] * len(completions),
        "completion_ids": [list(map(ord, completion)) for completion in completions],
        "finish_reasons": finish_reasons or ["stop"] * len(completions),
    }
    return function({**(columns or {}), **given}, timeout)


def score(name, completions, columns=None, finish_reasons=None, **arguments):
    return answer_of(name, completions, columns, finish_reasons, **arguments).scores


def mathematics(completions, answer, finish_reasons=None, **arguments):
    columns = {"answer": [answer] * len(completions)}
    return score("math_answer", completions, columns, finish_reasons, **arguments)


def write(folder: Path, code: str) -> str:
    (folder / "mine.py").write_text(code)
    return f"{folder / 'mine.py'}:reward"


def test_built_in_names_are_those_of_the_config():
    assert functions.BUILT_IN.keys() == reward.BUILT_IN
    with pytest.raises(ValueError, match=r"'accuracy': use cosine, .*, or file\.py:function"):
        reward.RewardConfig(functions=["accuracy"])


BY_TEXT = [
    ("exact", ["7", " 7\n", "7.", "77"], {}, [1, 1, 0, 0]),
    (
        "format",
        ["<think>\na\n</think>\nb", "so <think>a</think>", "<think>a"],
        {"pattern": "<think>.*</think>.*"},  # the whole completion, over all its lines
        [1, 0, 0],
    ),
    # 3 trigrams, all distinct; aba bab aba bab: 2 of 4; lower case: 1 of 3 is new; no trigram
    (
        "repetition",
        ["a b c d e", "a b a b a b", "No NO no no no", "a b"],
        {},
        [0, -1 / 2, -2 / 3, 0],
    ),
    ("repetition", ["a a a b"], {"repetition_n_grams": 1, "repetition_max_penalty": -2.0}, [-1]),
    (  # equation 13 of DAPO
        "soft_overlong",
        ["x" * n for n in (0, 80, 81, 90, 100, 101)],
        {"soft_max_length": 100, "soft_cache_length": 20},
        [0, 0, -0.05, -0.5, -1, -1],
    ),
    (f"{DEMO}:share_of_digits", ["12ab", "", "123"], {}, [0.5, 0, 1]),
    (f"{DEMO}:last_number", ["3 + 4 = 7", "**7**.", "7 = 3 + 4", "-7", ""], {}, [1, 1, 0, 0, 0]),
]


@pytest.mark.parametrize(("name", "completions", "arguments", "expected"), BY_TEXT)
def test_functions_score_texts(name, completions, arguments, expected):
    columns = {"answer": ["7"] * len(completions), "prompt": ["p"] * len(completions)}
    scores = score(name, completions, columns, **arguments)
    assert scores == pytest.approx(expected, rel=1e-12, abs=1e-12)


def half_cosine(share: float) -> float:
    return (1 + math.cos(math.pi * share)) / 2


SEVENS = ["", "77", "7777", "77777777", "7" * 20]  # max length 8: longer ones count as 8
LIMITS = {"cosine_min_len_value_correct": 2.0, "cosine_max_len_value_correct": 1.0}
LIMITS |= {"cosine_min_len_value_wrong": -10.0, "cosine_max_len_value_wrong": -6.0}
BETWEEN = [1 + half_cosine(1 / 2), -6 - 4 * half_cosine(3 / 8)]


@pytest.mark.parametrize(
    ("completions", "answers", "arguments", "expected"),
    [  # defaults of ms-swift: right answers fall from 1 to 0.5, wrong ones rise from -0.5 to 0
        (SEVENS, SEVENS, {"accuracy": "exact"}, [1, 0.5 + half_cosine(1 / 4) / 2, 0.75, 0.5, 0.5]),
        (SEVENS, ["x"] * 5, {"accuracy": "exact"}, [-0.5, -half_cosine(1 / 4) / 2, -0.25, 0, 0]),
        (["0.50", "0.6"], ["1/2"] * 2, LIMITS, BETWEEN),
    ],
)  # fmt: skip
def test_cosine_interpolates_between_lengths(completions, answers, arguments, expected):
    scores = score("cosine", completions, {"answer": answers}, cosine_max_len=8, **arguments)
    assert scores == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_cosine_passes_its_arguments_to_math_answer():
    values = {"cosine_max_len_value_correct": 1.0, "cosine_min_len_value_wrong": 0.0}  # 1 or 0
    completions, reasons = ["7", "\\boxed{7}", "\\boxed{7}"], ["stop", "stop", "length"]
    given = "cosine", completions, {"answer": ["7"] * 3}, reasons
    fields = values | {"cosine_max_len": 9}
    assert score(*given, **fields) == [1, 1, 1]
    assert score(*given, **fields, boxed=True) == [0, 1, 1]
    assert score(*given, **fields, only_finished=True) == [1, 1, 0]


@pytest.mark.parametrize(
    ("name", "arguments", "part"),
    [
        ("format", {}, "requires 'pattern': give it in `arguments`"),
        ("format", {"pattern": "("}, "missing ), unterminated subpattern"),
        ("cosine", {"cosine_max_len": 0}, "cosine_max_len 0 must be at least 1"),
        ("cosine", {"cosine_max_len": 9, "accuracy": "judge"}, "use exact or math_answer"),
        (
            "cosine",
            {"cosine_max_len": 9, "accuracy": "exact", "boxed": True},
            "boxed True and only_finished False are for accuracy math_answer: use that instead",
        ),
        ("repetition", {"repetition_n_grams": 0}, "must be at least 1, such as 3"),
        ("repetition", {"repetition_max_penalty": 1.0}, "use at most 0, such as -1.0"),
        ("repetition", {"repetition_n_grams": "3"}, "repetition_n_grams"),
        ("repetition", {"size": 3}, "'size': it has repetition_max_penalty, repetition_n_grams"),
        ("exact", {"pattern": "a"}, "no argument 'pattern': it has none"),
        ("soft_overlong", {"soft_max_length": 100, "soft_cache_length": 100}, "such as 20"),
        ("no_file.py:reward", {}, "no_file.py does not exist"),
        ("{mine}:nothing", {}, "has no function or class 'nothing'"),
        ("{mine}:reward", {"colour": 1}, "unexpected keyword argument 'colour'"),
    ],
)
def test_load_function_refuses_what_cannot_be_called(name, arguments, part, tmp_path):
    mine = write(tmp_path, "def reward(completions): return []").rpartition(":")[0]
    with pytest.raises(ValueError) as refused:
        load_function(RewardFunction(name=name.format(mine=mine), arguments=arguments))
    assert part in str(refused.value)


GSM8K_ANSWER = "48/2 = <<48/2=24>>24 clips.\n48+24 = <<48+24=72>>72 clips.\n#### 72"
MATRIX = "\\begin{pmatrix} 1 & 2 \\end{pmatrix}"
CUT_OFF = "4*5 = 20, and 9+9 = 18, hmm, that"
HEADINGS = {  # headings are no final answers, which follow them
    "#### Step 2: solve\nx=3\n\nThe final answer is \\boxed{3}": ("3", "2"),
    "#### 1. Add all\nThat makes 8": ("8", "1"),
    "#### 步骤 2\n所以是 42": ("42", "2"),
    "#### 24\nNo, it is \\boxed{72}": ("72", "24"),
}
PLAIN = [  # a reference, and right and wrong completions
    (GSM8K_ANSWER, ["48 and 24 make 72.", "####72", "#### $72.00"], ["72, then 13", "#### 24\n72"]),
    (GSM8K_ANSWER, ["The answer is \\boxed{72}"], ["", "no idea"]),
    (GSM8K_ANSWER, ["24 + 48 = 72 clips\n#### 72", "#### 72\nShe sold them in 2 months"], []),
    ("#### 1,080", ["It is 1080 dollars"], []),
    ("#### -3", ["-3"], ["3"]),
    ("\\frac{3}{4}", ["\\boxed{0.75}"], []),
    ("x^2 + 1", ["$1 + x^2$"], ["$1$"]),
    ("the answer is 12 apples", ["12"], []),
    (7, ["7"], []),
    # A bare reference is read whole.
    ("\\begin{array}{ccc} 1 & 2 \\end{array}", [f"\\boxed{{{MATRIX}}}"], ["\\boxed{2}"]),
    ("\\frac{3\\sqrt{2}}{2} \\text{ units}", ["\\boxed{\\frac{3\\sqrt{2}}{2}}"], ["\\boxed{2}"]),
    ("x=5\\text{ or }x=3", ["\\boxed{3, 5}"], ["\\boxed{3}"]),
    ("\\frac{ab}{c}", ["\\boxed{\\frac{ba}{c}}"], ["\\boxed{\\frac{a}{c}}"]),
    ("\\text{Evelyn}", ["\\boxed{\\text{Evelyn}}"], ["\\boxed{\\text{Eve}}"]),
    ("\\$18.90", ["\\boxed{18.9}"], ["\\boxed{18}"]),
    ("72 km/h", ["\\boxed{72}"], ["\\boxed{27}"]),
    *((right, [completion], []) for completion, (right, _) in HEADINGS.items()),
    *((wrong, [], [completion]) for completion, (_, wrong) in HEADINGS.items()),
]
BOXED = [  # only marked answers count
    (
        "18",
        [
            "\\boxed{20}. That is wrong. \\boxed{18} as 9+9 is not 20",
            "$x = \\boxed{\\frac{\\sqrt{36^2}}{2}}$",
            "#### 18",
        ],
        [
            CUT_OFF,
            "The answer is $18$.",
            "so 9+9 = 18, that is \\boxed{18",
            "not \\boxed{}, but 18",
            "\\boxed{18}. That is wrong. \\boxed{20}",
            "#### Step 2: add\n9 + 9 = 18",
        ],
    )
]
MARKED = {  # an answer that is marked, a right reference and a wrong one
    "x^2 + 1": ("x^2+1", "1"),
    "A": ("A", "B"),
    r"3 \times 4": ("12", "4"),
    r"\$18.00": ("18", "0"),
    "€18": ("18", "1"),
}
EITHER_WAY = [
    (  # boxes in a row are a set
        "2, 3",
        [
            "$x = \\boxed{2}$ or $x = \\boxed{3}$.",
            "$a$ is \\boxed{2}, as is shown above, and $b$ is \\boxed{3}",
            "\\fbox{1}, \\boxed{2, 3}",
        ],
        [
            "\\boxed{2}. We still have to add one to it: \\boxed{3}",
            "\\boxed{1}, \\boxed{2}, \\boxed{3}",
            "\\boxed{3}",
        ],
    ),
    *((right, [f"Thus it is so.\n#### {text}"], []) for text, (right, _) in MARKED.items()),
    *((wrong, [], [f"Thus it is so.\n#### {text}"]) for text, (_, wrong) in MARKED.items()),
]


@pytest.mark.parametrize(
    ("boxed", "answer", "right", "wrong"),
    [(False, *row) for row in PLAIN + EITHER_WAY] + [(True, *row) for row in BOXED + EITHER_WAY],
)
def test_math_answer_compares_values(boxed, answer, right, wrong):
    found = mathematics(right + wrong, answer, boxed=boxed)
    assert found == [1] * len(right) + [0] * len(wrong)


def test_math_answer_scores_others_among_hard_completions():
    """Each hard completion takes a second or more; together they would have been late."""
    completions = ["The answer is \\boxed{9}", *["\\boxed{9^{9^{9^{9}}}}"] * 9]
    columns = {"answer": ["9"] * 10}
    answer = answer_of("cosine", completions, columns, timeout=2.5, cosine_max_len=9)
    assert answer.scores[:2] == [0.5, 0.0]
    assert math.isnan(answer.scores[-1])
    assert answer.error.endswith("took the time of the call: raise reward.timeout")


def test_math_answer_only_finished_refuses_cut_completions():
    completions = [CUT_OFF, "\\boxed{18}", "\\boxed{18}", "18"]
    reasons = ["length", "length", "stop", "max_turns"]
    assert mathematics(completions, "18", reasons) == [1, 1, 1, 1]
    assert mathematics(completions, "18", reasons, only_finished=True) == [0, 0, 1, 1]


COMPILED: list[str] = []


@pytest.fixture(scope="module", autouse=True)
def _record_what_is_compiled():
    """Record the code that SymPy evaluates by Python, as the interpreter reports it."""
    import_module("sympy.physics.units")  # it evaluates names of its own when it is first needed

    def record(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "compile" and isinstance(arguments[0], bytes | str):
            source = arguments[0]
            COMPILED.append(source if isinstance(source, str) else source.decode())

    sys.addaudithook(record)


def code_from(completion: str, answer: str) -> list[str]:
    """Parts of a completion and a reference answer that Python compiles."""
    load_function(RewardFunction(name="math_answer"))  # its own file is code as well
    COMPILED.clear()
    with suppress(ValueError):  # no answer in the reference
        mathematics([completion], answer)
    return [s for s in COMPILED if not s.startswith(("from sympy import *", "def monomial_"))]


def test_recorder_sees_the_arithmetic_that_reaches_python():
    assert "Integer (13 )*(Integer (2 ))+Integer (5 )" in code_from("so 13*(2)+5", "31")


CALL = "__import__('os').system('touch planted')"
HOSTILE = [
    CALL,
    f"The final answer is 1+({CALL}) I hope",
    f"$\\operatorname{{eval}}({CALL})$",
    f"$\\text{{{CALL}}}$",
    f"$S({CALL}) = \\sin({CALL})$",
    "1+(2).__class__.__base__.__subclasses__()",
    "1 if planted else 2",
]


@pytest.mark.parametrize("hostile", HOSTILE)
def test_math_answer_runs_no_code(hostile, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for completion, answer in ((hostile, "7"), (f"7 {hostile} 8", "8"), ("8", hostile)):
        assert not any("planted" in s or "__" in s for s in code_from(completion, answer))
    assert list(tmp_path.iterdir()) == []


PARTS = [*"0123456789 ()+-*/^.,=$'\"[]{}:;%", "\n", CALL, "__class__", "lambda x:", "eval", "x"]
PARTS += ["planted", "\\boxed{", "\\frac{", "####", "answer is", "\\text{", "٣", "×", "**", "1e9"]
# Since Python 3.12 a digit of another script begins a token like a name, which SymPy quotes.
ARITHMETIC = re.compile(r"(Integer|Float|Symbol \('[^'\\A-Za-z_]*' \)|[\d\s().,'+*/-])*")


@settings(max_examples=300)
@given(st.lists(st.sampled_from(PARTS), max_size=12).map("".join))
def test_math_answer_evaluates_only_arithmetic(completion):
    for source in code_from(completion, "7"):
        assert ARITHMETIC.fullmatch(source) or not is_python(source), source


def is_python(source: str) -> bool:
    """Whether Python can parse the text."""
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("def reward(completions, level): return level", 3),  # only the named columns
        ("def reward(completions, **_): return [len(_)]", 0),
        ("def reward(completions, **columns): return [len(columns)]", 3 + 3),  # all columns
        # Arguments of the call and the config win over columns of the same name.
        ("def reward(completions, k, **c): return [len(x) + k for x in completions]", 12),
    ],
)
def test_call_passes_the_named_columns(code, expected, tmp_path):
    columns = {"level": [3], "other": [0], "k": [0], "completions": ["b"]}
    arguments = {"k": 10} if " k," in code else {}
    assert score(write(tmp_path, code), ["aa"], columns, **arguments) == [expected]


def test_load_function_imports_neighbours_of_a_file(tmp_path):
    (tmp_path / "neighbour_of_mine.py").write_text("VALUE = 5")
    code = """
from __future__ import annotations
from dataclasses import dataclass
from neighbour_of_mine import VALUE

@dataclass
class Score:
    value: float

def reward(completions):
    return [Score(VALUE).value for _ in completions]
"""
    assert score(write(tmp_path, code), ["a"]) == [5]


def returning(folder: Path, value: str) -> str:
    return write(folder, f"import math, numpy, torch\ndef reward(completions): return {value}")


@pytest.mark.parametrize(
    "returned",
    [
        "(1, True)",
        "[numpy.float32(1), numpy.int8(1)]",
        "torch.ones(2, dtype=torch.bfloat16)",
        "[torch.tensor(1), torch.ones(1)]",
    ],
)
def test_call_makes_floats_of_numbers_of_any_kind(returned, tmp_path):
    scores = score(returning(tmp_path, returned), ["a", "b"])
    assert scores == [1.0, 1.0]
    assert all(type(value) is float for value in scores)


@pytest.mark.parametrize(
    ("returned", "error"),
    [  # no list of scores, or a score that is none
        ("None", "returned NoneType instead of a list, for 2 completions"),
        ("torch.tensor(1.0)", "returned float instead of a list"),
        ("numpy.ones((2, 2))", "the score [1.0, 1.0]"),
        ("[torch.ones(2)] * 2", "the score tensor([1., 1.])"),
        ("[1.0]", "1 score for 2 completions"),
        ("[1.0, '1']", "the score '1'"),
        ("[1.0, float('nan')]", "returned the score nan"),
        ("[1.0, -math.inf]", "returned the score -inf"),
        ("[1.0, 10**400]", "returned the score 10000000"),
        ("[1.0, KeyError('a')]", "returned KeyError: 'a'"),
        ("numpy.array([1.0, None])", "returned the score None"),
    ],
)
def test_call_names_a_value_that_is_no_score(returned, error, tmp_path):
    name = returning(tmp_path, returned)
    if error.startswith(("returned the", "returned Key")):
        answer = answer_of(name, ["a", "b"])
        assert answer.scores == pytest.approx([1.0, math.nan], nan_ok=True)
        assert answer.error.startswith(error)
    else:
        with pytest.raises(NoScores) as refused:
            score(name, ["a", "b"])
        assert error in str(refused.value)


def test_wanted_columns_are_parameters_without_another_value(tmp_path):
    name = write(tmp_path, "def reward(completions, prompts, a, b, c=1, *, d, **rest): ...")
    assert load_function(RewardFunction(name=name, arguments={"b": 1})).wanted_columns == ["a", "d"]


def test_worker_imports_nothing_heavy():
    heavy = ("sympy", "pyarrow", "numpy", "torch", "transformers")
    code = (
        "import megatron_grpo.rewards.worker, megatron_grpo.rewards.builtin, sys\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"
