import json
import re
import socket
import tempfile
from datetime import datetime
from pathlib import Path
from time import monotonic

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase

from helpers.models.shapes import LLAMA_70B
from helpers.models.tiny import EOS_ID, character_tokenizer
from megatron_grpo.agents.chat import ChatTemplate
from megatron_grpo.config.config import Config
from megatron_grpo.config.file import dump_config, load_config
from megatron_grpo.data.prompts import Prompt, end_tokens, load_prompts, with_date
from megatron_grpo.data.stream import PromptStream
from megatron_grpo.evaluation.evaluation import as_evaluated, load_eval_prompts
from megatron_grpo.rewards.by_source import reference_faults

CONTEXT = 512
TINY = Path(__file__).parents[3] / "configs" / "tiny_cpu.yaml"
ROWS = [{"prompt": f"question {i}", "answer": str(i), "level": i} for i in range(5)]


def config(path: Path | str, *overrides: str) -> Config:
    return load_config(TINY, [f"data.path={path}", "rollout.max_completion_length=12", *overrides])


def jsonl(folder: Path, rows: list, name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(cfg: Config) -> list[Prompt]:
    return load_prompts(cfg, character_tokenizer(250), CONTEXT)


def refusal(cfg: Config) -> str:
    with pytest.raises(ValueError) as refused:
        load(cfg)
    return str(refused.value)


def test_load_prompts_has_tokens_of_the_chat_template(tmp_path):
    cfg = config(jsonl(tmp_path, ROWS), "data.system_prompt=Be brief")
    prompt = load(cfg)[3]
    messages = [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "question 3"},
    ]
    wanted = character_tokenizer(250).apply_chat_template(messages, add_generation_prompt=True)
    assert list(prompt.token_ids) == wanted["input_ids"]
    assert prompt.text == (
        "<start>system\nBe brief<eos>\n<start>user\nquestion 3<eos>\n<start>assistant\n"
    )
    assert prompt.index == 3


def test_load_prompts_passes_variables_to_the_template(tmp_path):
    tokenizer = character_tokenizer(250)
    tokenizer.chat_template += "{% if enable_thinking is false %}<no thoughts>{% endif %}"
    path = jsonl(tmp_path, ROWS)
    given = "data.chat_template_kwargs.enable_thinking=false"
    for cfg, end in ((config(path), "assistant\n"), (config(path, given), "<no thoughts>")):
        assert all(p.text.endswith(end) for p in load_prompts(cfg, tokenizer, CONTEXT))
    evaluated = as_evaluated(config(path, given, "eval.data={}"))
    assert load_prompts(evaluated, tokenizer, CONTEXT)[0].text.endswith("<no thoughts>")


DATE = "2024-05-06T07:08:09+02:00"


def dated_tokenizer() -> PreTrainedTokenizerBase:
    tokenizer = character_tokenizer(250)
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y %H:%M') }}\n" + tokenizer.chat_template
    return tokenizer


def test_load_prompts_passes_the_date_to_the_template(tmp_path):
    cfg, tokenizer = config(jsonl(tmp_path, ROWS), f"data.date={DATE}"), dated_tokenizer()
    assert cfg.data.date == DATE
    assert load_prompts(cfg, tokenizer, CONTEXT)[0].text.startswith("06 May 2024 07:08\n")
    template = ChatTemplate.of(tokenizer, cfg, [EOS_ID])
    asked = template.render([{"role": "user", "content": "a"}], None, is_prompt=True)
    assert asked.startswith("06 May 2024 07:08\n")


def test_with_date_keeps_the_date_of_the_first_start(tmp_path):
    run = tmp_path / "run"
    cfg = config(jsonl(tmp_path, ROWS), f"train.run_dir={run}", "eval.data={}")
    assert with_date(cfg, character_tokenizer(250)) == cfg  # its template writes no date
    before = datetime.now().astimezone().replace(microsecond=0)
    first = with_date(cfg, dated_tokenizer())
    assert before <= datetime.fromisoformat(first.data.date) <= datetime.now().astimezone()
    run.mkdir()
    dated = first.model_copy(update={"data": first.data.model_copy(update={"date": DATE})})
    (run / "config.yaml").write_text(dump_config(dated))
    assert with_date(cfg, dated_tokenizer()) == dated == load_config(run / "config.yaml")
    (run / "config.yaml").write_text(f"data: {{date: {DATE}}}")  # without quotes, as people write
    assert with_date(cfg, dated_tokenizer()) == dated
    assert as_evaluated(dated).data.date == DATE
    replay = cfg.train.model_copy(update={"replay": run, "run_dir": tmp_path})
    replayed = with_date(cfg.model_copy(update={"train": replay}), dated_tokenizer())
    assert replayed.data.date == DATE
    given = config(tmp_path / "rows.jsonl", f"train.run_dir={run}", "data.date=2023-01-01")
    assert with_date(given, dated_tokenizer()) == given


def test_load_prompts_refuses_an_unused_variable(tmp_path):
    error = "data.chat_template_kwargs.enable_thinking does nothing: the chat template"
    given = "data.chat_template_kwargs.enable_thinking=false"
    assert error in refusal(config(jsonl(tmp_path, ROWS), given))


def test_load_prompts_has_special_tokens_once(tmp_path):
    tokenizer = character_tokenizer(250)
    start = tokenizer.convert_tokens_to_ids("<start>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<start> $A", special_tokens=[("<start>", start)]
    )
    path = jsonl(tmp_path, [{"prompt": "ab", "answer": ""}])
    (chat,) = load_prompts(config(path), tokenizer, CONTEXT)
    (raw,) = load_prompts(config(path, "data.apply_chat_template=false"), tokenizer, CONTEXT)
    assert chat.token_ids.count(start) == chat.text.count("<start>") == 2
    assert [*raw.token_ids] == [start, *tokenizer.convert_tokens_to_ids(["a", "b"])]


def test_row_has_every_column_and_the_mapped_answer(tmp_path):
    rows = [{"q": "one", "solution": "1", "level": 7}]
    cfg = config(jsonl(tmp_path, rows), "data.prompt_column=q", "data.answer_column=solution")
    assert load(cfg)[0].row == {"q": "one", "solution": "1", "level": 7, "answer": "1"}
    cfg = config(jsonl(tmp_path, rows), "data.prompt_column=q", "data.answer_column=null")
    assert load(cfg)[0].row == rows[0]


def test_load_prompts_reads_folders_of_jsonl_and_parquet(tmp_path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS[3:]), tmp_path / "b.parquet")
    path = jsonl(tmp_path, ROWS[:3], "a.jsonl")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # a byte order mark is allowed
    (tmp_path / "README.md").write_text("no data")
    found = load(config(tmp_path))
    assert [(prompt.index, prompt.row) for prompt in found] == list(enumerate(ROWS))


def test_split_takes_the_files_that_it_names(tmp_path):
    for name, rows in (("train", ROWS[:3]), ("test-00000-of-00001", ROWS[3:])):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / f"{name}.parquet")
    assert [prompt.row for prompt in load(config(tmp_path))] == ROWS[:3]
    assert [prompt.row for prompt in load(config(tmp_path, "data.split=test"))] == ROWS[3:]
    message = refusal(config(tmp_path, "data.split=validation"))
    assert "no file of data.split validation" in message
    assert "it has test-00000-of-00001.parquet, train.parquet" in message


def test_split_refuses_files_without_a_split_among_others(tmp_path):
    """Files without a split might be training data: nobody knows."""
    for name in ("problems", "test"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(ROWS[0]))
    assert "no file of data.split train" in refusal(config(tmp_path))
    (tmp_path / "train.jsonl").write_text(json.dumps(ROWS[0]))
    message = refusal(config(tmp_path))
    assert "and problems.jsonl: rename these, for example to train-problems.jsonl" in message


@pytest.mark.parametrize(
    ("rows", "override", "error"),
    [
        (ROWS, "data.split=test", "rows.jsonl is one file: give the file of that split"),
        (ROWS, "data.subset=main", "set data.subset=null"),
        (ROWS, "data.prompt_column=question", "'prompt', 'answer', 'level'"),
        ([], "data.shuffle=true", "has no rows"),
    ],
)
def test_load_prompts_refuses_a_file_without_the_named_part(tmp_path, rows, override, error):
    assert error in refusal(config(jsonl(tmp_path, rows), override))


# Lines that make no prompt, and their error.
BAD_LINES = [
    (b'{"prompt": ', "not JSON: Expecting value"),
    (b"[" * 100_000, "not JSON: maximum recursion depth"),
    (b'["prompt"]', "not a JSON object: list"),
    (b'{"prompt": "caf\xe9", "answer": "1"}', "not UTF-8: byte 0xe9 at column 16"),
    (b'{"answer": "1"}', "no column 'prompt'"),
    (b'{"prompt": null, "answer": "1"}', "'prompt' is null"),
    (b'{"prompt": "a", "answer": null}', "'answer' is null"),
    (b'{"prompt": " \\n", "answer": "1"}', "'prompt' is empty"),
    (b'{"prompt": 3, "answer": "1"}', "'prompt' is neither a text nor messages"),
    (b'{"prompt": [{"role": "user"}], "answer": "1"}', "'prompt' is neither a text nor messages"),
    (
        b'{"prompt": [{"role": "user", "content": null}], "answer": "1"}',
        "messages with role and content: message 1, {'role': 'user'}: the content of a message may",
    ),
    (b'{"prompt": "\\ud800", "answer": "1"}', "'prompt' is not valid Unicode"),
    (b'{"prompt": "a", "answer": "\\udfff"}', "'answer' is not valid Unicode"),
    (b'{"prompt": "' + b"x" * 600 + b'", "answer": "1"}', "619 tokens of at most 500"),
]


def with_bad_lines(folder: Path) -> Path:
    """A good row, a blank line, and then every bad line followed by a good row."""
    good = json.dumps(ROWS[0]).encode()
    path = folder / "rows.jsonl"
    path.write_bytes(
        good + b"\r\n \n" + b"".join(line + b"\n" + good + b"\n" for line, _ in BAD_LINES)
    )
    return path


def test_on_invalid_lists_every_row_with_its_line(tmp_path):
    path = with_bad_lines(tmp_path)
    message = refusal(config(path))
    first, *listed, last = message.splitlines()
    assert first.startswith(f"14 of 29 rows of {path} cannot be used (3 'prompt' is neither")
    for number, (line, (_, said)) in enumerate(zip(listed, BAD_LINES, strict=True)):
        assert line.startswith(f"  {path} line {3 + 2 * number}: "), line
        assert said in line
    assert "data.on_invalid=skip" in last
    assert "data.max_prompt_length=500 leaves out only those that are too long" in last


def test_on_invalid_skip_leaves_rows_out(tmp_path, caplog):
    path = with_bad_lines(tmp_path)
    prompts = load(config(path, "data.on_invalid=skip"))
    # Rows keep their numbers: only the blank line has none.
    assert [prompt.index for prompt in prompts] == list(range(0, 29, 2))
    assert {prompt.row["prompt"] for prompt in prompts} == {"question 0"}
    (warning,) = caplog.messages
    assert warning.startswith(f"14 of 29 rows of {path} cannot be used and are left out: ")
    assert "2 not JSON" in warning


@settings(max_examples=50)
@given(
    st.lists(
        st.one_of(
            st.text().map(lambda text: {"prompt": f"ok {text}"[:50], "answer": "1"}),
            st.binary().filter(lambda line: b"\n" not in line and line.strip() != b""),
            st.dictionaries(st.sampled_from(["prompt", "answer"]), st.none() | st.integers()),
        ),
        max_size=8,
    )
)
def test_on_invalid_skip_uses_good_lines_among_any_others(lines):
    rows = {i: line for i, line in enumerate(lines) if isinstance(line, dict) and "ok" in str(line)}
    encoded = [json.dumps(line).encode() if isinstance(line, dict) else line for line in lines]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        path.write_bytes(b"\n".join([*encoded, json.dumps(ROWS[0]).encode()]))
        prompts = load(config(path, "data.on_invalid=skip"))
        assert {p.index: p.row for p in prompts[:-1]} == rows
        assert prompts[-1].row == ROWS[0]
        bad = [f"{path} line {i + 1}: " for i in range(len(lines)) if i not in rows]
        if bad:
            listed = re.findall(
                rf"^  ({re.escape(str(path))} line \d+: )", refusal(config(path)), re.M
            )
            assert listed == bad


WRITES_CALLS = (
    "{% for message in messages %}{{ message.content }}"
    "{% if 'tool_calls' in message %}{{ message.tool_calls | tojson }}{% endif %}{% endfor %}"
)


def with_call(**arguments: object) -> dict[str, object]:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    said_it = {"role": "tool", "content": "7"}
    return {"prompt": [{"role": "user", "content": "a"}, said, said_it], "answer": "1"}


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "table of JSON"])
def test_messages_have_the_fields_that_were_written(tmp_path, kind):
    tokenizer = character_tokenizer(250)
    rows = [
        with_call(city="Bern"),
        with_call(x=None, at=[{"p": 1}, {"q": {"r": 2}}, None]),
        {"prompt": [{"role": "user", "content": "d"}], "answer": "1"},
    ]
    tokenizer.chat_template = WRITES_CALLS
    path = jsonl(tmp_path, rows)
    if kind != "jsonl":
        table = pyarrow.Table.from_pylist(rows)
        filled = table.to_pylist()[0]["prompt"][1]["tool_calls"][0]["function"]["arguments"]
        assert filled == {"city": "Bern", "x": None, "at": None}
        if kind == "table of JSON":  # like rows that `datasets` reads from JSON Lines
            texts = [[json.dumps(message) for message in row["prompt"]] for row in rows]
            chats = pyarrow.array(texts).cast(pyarrow.list_(pyarrow.json_(pyarrow.string())))
            table = table.set_column(0, "prompt", chats)
        path = tmp_path / "rows.parquet"
        pyarrow.parquet.write_table(table, path)
    prompts = load_prompts(config(path), tokenizer, CONTEXT)
    call = '[{"type": "function", "function": {"name": "f", "arguments": %s}}]'
    assert [prompt.text for prompt in prompts] == [
        "a" + call % '{"city": "Bern"}' + "7",
        "a" + call % '{"at": [{"p": 1}, {"q": {"r": 2}}, null]}' + "7",
        "d",
    ]
    assert prompts[2].row == rows[2], "environments and agents read rows, too"


def test_contents_in_parts_are_joined_to_texts(tmp_path):
    parts = [{"type": "text", "text": "1 +"}, {"type": "text", "text": " 1"}]
    chat = [{"role": "system", "content": parts}, {"role": "user", "content": parts}]
    path = jsonl(tmp_path, [{"prompt": chat, "answer": "2"}])
    [prompt] = load(config(path))
    assert prompt.text == "<start>system\n1 + 1<eos>\n<start>user\n1 + 1<eos>\n<start>assistant\n"
    assert prompt.messages == [{**message, "content": "1 + 1"} for message in chat]
    picture = [{"type": "image_url", "image_url": {"url": "a.png"}}, *parts]
    path = jsonl(tmp_path, [{"prompt": [{"role": "user", "content": picture}], "answer": "2"}])
    assert "not a part of type image_url; data.image_column names the" in refusal(config(path))


REFUSES = "{% if messages[0].tool_calls %}{{ raise_exception('begin') }}{% endif %}"
# Like the templates of Llama 3.1 and later.
ASKS_FOR_CALLS = (
    "{% for message in messages %}{% if 'tool_calls' in message %}"
    "{{ message.tool_calls | length }} calls{% endif %}{{ message.content }}{% endfor %}"
)
CALLS_3 = [{"role": "user", "content": "a", "tool_calls": 3}]
SYSTEM, USER = {"role": "system", "content": "a"}, {"role": "user", "content": "b"}


@pytest.mark.parametrize(
    ("chat", "template", "override", "error"),
    [
        (CALLS_3, REFUSES, "", "refused by the chat template: .*begin"),
        (CALLS_3, ASKS_FOR_CALLS, "", r"refused by the chat template: .*no len\(\)"),
        (with_call(city="\ud83d")["prompt"], WRITES_CALLS, "", "'prompt' is not valid Unicode"),
        ([{**USER, "x": "DEEP"}], WRITES_CALLS, "", "'prompt' is nested too deeply"),
        ([USER], "", "data.apply_chat_template=false", ".*chat messages, wh"),
        ([SYSTEM, USER], "", "data.system_prompt=x", ".*its own system message"),
        (
            [USER, {"role": "assistant", "content": "2"}],
            "",
            "",
            "'prompt' ends with the assistant's",
        ),
    ],
    ids=["refused", "a field", "Unicode", "deep", "no template", "system message", "own turn"],
)
def test_load_prompts_lists_chats_that_make_no_prompt(tmp_path, chat, template, override, error):
    tokenizer = character_tokenizer(250)
    own = tokenizer.chat_template
    tokenizer.chat_template = {"": own, REFUSES: REFUSES + own}.get(template, template)
    path = jsonl(tmp_path, [*ROWS, {"prompt": chat, "answer": "1"}])
    path.write_text(path.read_text().replace('"DEEP"', "[" * 3000 + "]" * 3000))
    overrides = [override] if override else []
    with pytest.raises(ValueError, match=rf"{path} line 6: {error}"):
        load_prompts(config(path, *overrides), tokenizer, CONTEXT)
    skips = config(path, *overrides, "data.on_invalid=skip")
    assert [prompt.row for prompt in load_prompts(skips, tokenizer, CONTEXT)] == ROWS


@pytest.mark.parametrize(
    ("prompt", "answer", "faults", "usable"),
    [
        (["a", None, "c", "d"], ["1", "2", None, "4"], ["1: 'prompt'", "2: 'answer'"], [0, 3]),
        ([b"a", b"\xff", b"c"], ["1"] * 3, ["1: not UTF-8"], [0, 2]),
    ],
    ids=["null", "bad UTF-8"],
)
def test_on_invalid_lists_rows_of_a_table_by_number(tmp_path, prompt, answer, faults, usable):
    values = pyarrow.array(prompt).cast(pyarrow.string(), safe=False)
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": values, "answer": answer}), path)
    message = refusal(config(path))
    assert all(f"{path} row {fault}" in message for fault in faults)
    assert [p.index for p in load(config(path, "data.on_invalid=skip"))] == usable


def test_load_prompts_names_a_file_that_is_no_table(tmp_path):
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1 and nothing else")
    assert f"{path} cannot be read as Parquet: " in refusal(config(path))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    path.write_bytes(path.read_bytes()[:-20])
    assert f"{path} cannot be read as Parquet: " in refusal(config(path))


@pytest.mark.parametrize("name", ["rows.jsonl", "no/such/folder", "/nowhere", "."])
def test_load_prompts_refuses_missing_data(name, tmp_path):
    message = refusal(config(tmp_path / name if name == "." else name))
    assert "does not exist" in message or "has no .jsonl or .parquet file" in message


def test_load_prompts_gives_up_an_unreachable_hub_in_seconds(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"  # closed before it is used
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    monkeypatch.setattr("datasets.config.HF_ENDPOINT", endpoint)
    began = monotonic()
    message = refusal(config("nobody/no-such-data-set", "data.subset=main"))
    assert monotonic() - began < 20  # each request of `datasets` would take 30 s and more
    assert "nobody/no-such-data-set is not a local file or folder" in message
    assert "subset main, split train" in message
    assert "Connection refused" in message
    assert not datasets.config.HF_HUB_OFFLINE


def test_max_prompt_length_leaves_out_longer_ones(tmp_path, caplog):
    # The template adds 19 tokens, and 512 - 12 leaves 500: 481 characters are the most.
    path = jsonl(tmp_path, [{"prompt": "x" * (481 + i), "answer": ""} for i in range(2)])
    message = refusal(config(path))
    assert f"{path} line 2: too long for the model's context: 501 tokens of at most 500" in message
    assert "data.max_prompt_length=500 leaves out" in message
    for left_out in ("data.max_prompt_length=500", "data.on_invalid=skip"):
        assert [len(p.token_ids) for p in load(config(path, left_out))] == [500]
    assert f"1 of 2 prompts of {path} have more than 500 tokens" in caplog.text
    message = refusal(config(path, "data.max_prompt_length=5"))
    assert "data.max_prompt_length 5 leaves out all 2" in message


def test_max_completion_length_leaves_room_for_prompts(tmp_path):
    message = refusal(config(jsonl(tmp_path, ROWS), "rollout.max_completion_length=512"))
    assert "rollout.max_completion_length 512" in message
    assert "use at most 511" in message
    held_out = "eval.sets.a={data: {}, max_completion_length: 512}"
    view = as_evaluated(config(jsonl(tmp_path, ROWS), held_out), "a")
    with pytest.raises(
        ValueError, match=r"^eval\.sets\.a: max_completion_length 512 leaves no room"
    ):
        load_eval_prompts(view, "a", character_tokenizer(250), CONTEXT)


def test_load_prompts_needs_a_chat_template(tmp_path):
    tokenizer = character_tokenizer(250)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="apply_chat_template=false"):
        load_prompts(config(jsonl(tmp_path, ROWS)), tokenizer, CONTEXT)


def test_fingerprint_changes_with_the_prompts_only(tmp_path):
    def fingerprint(rows: list, *overrides: str, vocabulary: int = 250) -> str:
        cfg = config(jsonl(tmp_path, rows), *overrides)
        found = load_prompts(cfg, character_tokenizer(vocabulary), CONTEXT)
        return PromptStream(found, 2, seed=1, shuffle=True).fingerprint

    same = fingerprint(ROWS)
    assert same.startswith("5 prompts of SHA-256 ")
    assert fingerprint(ROWS) == fingerprint(ROWS, "data.prompt_column=prompt") == same
    others = [
        fingerprint([*ROWS, {"prompt": "one more", "answer": "", "level": 5}]),
        fingerprint(ROWS[::-1]),
        fingerprint([{**ROWS[0], "prompt": "question x"}, *ROWS[1:]]),
        fingerprint(ROWS, vocabulary=60),
    ]
    assert len({same, *others}) == 5


def test_load_prompts_of_paths_keeps_their_rows(tmp_path):
    first = jsonl(tmp_path, [*ROWS[:2], {"prompt": None, "answer": ""}], "a.jsonl")
    second = jsonl(tmp_path, ROWS[2:], "b.jsonl")
    pair = f"[{{path: {first}, weight: 2}}, {{path: {second}, weight: 1}}]"
    assert f"1 of 3 rows of {first} cannot be used" in refusal(config(pair))
    found = load(config(pair, "data.on_invalid=skip"))
    assert [(p.index, p.path) for p in found] == [(0, 0), (1, 0), (3, 1), (4, 1), (5, 1)]
    assert [prompt.row for prompt in found] == ROWS


def test_end_tokens_have_stop_tokens_of_the_config():
    def ends(*stops: int) -> tuple[int, ...]:
        rollout = config("rows", f"rollout.stop_token_ids={[*stops]}").rollout
        return end_tokens(LLAMA_70B, character_tokenizer(250), rollout)

    assert ends() == (EOS_ID,)
    assert ends(9, 4, 9) == (EOS_ID, 4, 9)
    with pytest.raises(ValueError, match=r"token_ids has 128256, .*vocabulary ends at 128255"):
        ends(4, 128256)


SOURCES = [
    "sources.column=data_source",
    "sources.by_name={math: {reward: {functions: [math_answer]}}, words: {}}",
]


def test_source_of_a_row_is_read_from_its_column(tmp_path):
    rows = [
        {"prompt": "a", "answer": "1", "data_source": "math"},
        {"prompt": "b", "answer": "no number", "data_source": "words"},
    ]
    cfg = config(jsonl(tmp_path, rows), *SOURCES)
    prompts = load_prompts(cfg, character_tokenizer(250), CONTEXT, fault_of=reference_faults(cfg))
    assert [prompt.source for prompt in prompts] == ["math", "words"]


def test_source_lists_rows_without_one(tmp_path):
    rows = [
        {"prompt": "a", "answer": "1", "data_source": "math"},
        {"prompt": "b", "answer": "2", "data_source": "maths"},
        {"prompt": "c", "answer": "3"},
    ]
    message = refusal(config(jsonl(tmp_path, rows), *SOURCES))
    assert "line 2: data_source not in sources.by_name (math, words): 'maths'" in message
    assert "line 3: no data_source" in message
    message = refusal(config(jsonl(tmp_path, rows), *SOURCES, "sources.column=kind"))
    assert "sources.column 'kind' is not a column of" in message
