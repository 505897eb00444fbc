import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers.processors import TemplateProcessing

from megatron_grpo.config import Config
from megatron_grpo.config_file import load_config
from megatron_grpo.prompts import Prompt, PromptStream, load_prompts
from models import character_tokenizer

CONTEXT = 512
TINY = Path(__file__).parents[2] / "configs" / "tiny_cpu.yaml"
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


def test_chat_template_gives_the_token_ids_that_the_tokenizer_itself_gives(tmp_path):
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


def test_chat_messages_in_the_prompt_column_are_taken_as_they_are(tmp_path):
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    cfg = config(jsonl(tmp_path, [{"prompt": chat, "answer": "1"}]))
    assert (
        load(cfg)[0].text == "<start>user\nhi<eos>\n<start>assistant\nho<eos>\n<start>assistant\n"
    )


def test_raw_prompts_are_the_text_alone(tmp_path):
    prompt = load(config(jsonl(tmp_path, ROWS), "data.apply_chat_template=false"))[0]
    assert prompt.text == "question 0"
    assert list(prompt.token_ids) == character_tokenizer(250)("question 0")["input_ids"]


def test_special_tokens_come_from_the_template_or_else_from_the_tokenizer(tmp_path):
    tokenizer = character_tokenizer(250)
    start = tokenizer.convert_tokens_to_ids("<start>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<start> $A", special_tokens=[("<start>", start)]
    )
    path = jsonl(tmp_path, [{"prompt": "ab", "answer": ""}])
    (chat,) = load_prompts(config(path), tokenizer, CONTEXT)
    (raw,) = load_prompts(config(path, "data.apply_chat_template=false"), tokenizer, CONTEXT)
    assert chat.token_ids.count(start) == chat.text.count("<start>") == 2
    assert raw.token_ids == (start, *tokenizer.convert_tokens_to_ids(["a", "b"]))


def test_rewards_see_every_column_and_the_mapped_answer(tmp_path):
    rows = [{"q": "one", "solution": "1", "level": 7}]
    cfg = config(jsonl(tmp_path, rows), "data.prompt_column=q", "data.answer_column=solution")
    assert load(cfg)[0].row == {"q": "one", "solution": "1", "level": 7, "answer": "1"}
    cfg = config(jsonl(tmp_path, rows), "data.prompt_column=q", "data.answer_column=null")
    assert load(cfg)[0].row == rows[0]


def test_jsonl_parquet_and_folders_of_them_hold_the_same_rows(tmp_path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS[3:]), tmp_path / "b.parquet")
    jsonl(tmp_path, ROWS[:3], "a.jsonl")
    (tmp_path / "README.md").write_text("no data")
    from_files = load(config(tmp_path / "a.jsonl")) + load(config(tmp_path / "b.parquet"))
    from_folder = load(config(tmp_path))
    assert [prompt.row for prompt in from_folder] == ROWS == [prompt.row for prompt in from_files]
    assert [prompt.index for prompt in from_folder] == [0, 1, 2, 3, 4]


def test_missing_column_is_answered_with_those_present(tmp_path):
    message = refusal(config(jsonl(tmp_path, ROWS), "data.prompt_column=question"))
    assert "data.prompt_column 'question'" in message
    assert "'prompt', 'answer', 'level'" in message
    partly = [*ROWS, {"prompt": "no answer"}]
    assert "1 of 6 rows lack it; row 5 has 'prompt'" in refusal(config(jsonl(tmp_path, partly)))


def test_empty_data_is_refused(tmp_path):
    assert "has no rows" in refusal(config(jsonl(tmp_path, [])))


@pytest.mark.parametrize("prompt", ["", None, 3, [], ["hi"], [{"role": "user"}]])
def test_prompt_that_is_neither_text_nor_chat_is_refused(prompt, tmp_path):
    message = refusal(config(jsonl(tmp_path, [*ROWS, {"prompt": prompt, "answer": "1"}])))
    assert "column 'prompt' of row 5" in message
    assert repr(prompt) in message


def test_broken_line_is_named(tmp_path):
    path = jsonl(tmp_path, ROWS)
    path.write_text(path.read_text() + '{"prompt": \n')
    assert f"{path} line 6 is not JSON" in refusal(config(path))


@pytest.mark.parametrize("name", ["rows.jsonl", "no/such/folder", "/nowhere", "."])
def test_missing_data_is_refused_at_once(name, tmp_path):
    message = refusal(config(tmp_path / name if name == "." else name))
    assert "does not exist" in message or "has no .jsonl or .parquet file" in message


def test_name_of_a_data_set_that_no_hub_serves_is_refused(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    message = refusal(config("nobody/no-such-data-set", "data.subset=main"))
    assert "nobody/no-such-data-set is no file or folder here" in message
    assert "subset main, split train" in message


def test_prompts_longer_than_the_context_are_listed_with_their_lengths(tmp_path):
    # The template adds 19 tokens, and 512 - 12 leaves 500: 481 characters are the most.
    rows = [{"prompt": "x" * (480 + i), "answer": ""} for i in range(8)]
    path = jsonl(tmp_path, rows)
    message = refusal(config(path))
    assert "6 of 8 prompts have more than the 500 tokens" in message
    assert "row 2 (501), row 3 (502), row 4 (503), row 5 (504), row 6 (505), ..." in message
    assert "Set data.max_prompt_length to at most 500" in message
    assert [len(p.token_ids) for p in load(config(path, "data.max_prompt_length=500"))] == [
        499,
        500,
    ]


def test_max_prompt_length_leaves_longer_rows_out_and_says_so(tmp_path, caplog):
    rows = [ROWS[0], {"prompt": "x" * 100, "answer": ""}, ROWS[2]]
    prompts = load(config(jsonl(tmp_path, rows), "data.max_prompt_length=60"))
    assert [prompt.index for prompt in prompts] == [0, 2]
    assert "1 of 3 prompts have more than 60 tokens and are left out" in caplog.text
    message = refusal(config(jsonl(tmp_path, rows), "data.max_prompt_length=5"))
    assert "data.max_prompt_length 5 leaves out all 3" in message


def test_completion_length_that_fills_the_context_is_refused(tmp_path):
    message = refusal(config(jsonl(tmp_path, ROWS), "rollout.max_completion_length=512"))
    assert "max_completion_length 512" in message
    assert "use at most 511" in message


def test_tokenizer_without_chat_template_is_refused(tmp_path):
    tokenizer = character_tokenizer(250)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="apply_chat_template=false"):
        load_prompts(config(jsonl(tmp_path, ROWS)), tokenizer, CONTEXT)


def test_system_prompt_does_not_hide_the_rows_own(tmp_path):
    chat = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    path = jsonl(tmp_path, [{"prompt": chat, "answer": "1"}])
    assert "its own system message" in refusal(config(path, "data.system_prompt=x"))


def prompts(count: int) -> list[Prompt]:
    return [Prompt(index=i, token_ids=(i,), text=str(i), row={}) for i in range(count)]


def batches(stream: PromptStream, count: int) -> list[list[int]]:
    return [[prompt.index for prompt in stream.batch(i)] for i in range(count)]


def test_batches_are_a_function_of_their_number_and_the_seed():
    first = batches(PromptStream(prompts(50), 8, seed=1, shuffle=True), 20)
    again = PromptStream(prompts(50), 8, seed=1, shuffle=True)
    assert [prompt.index for prompt in again.batch(19)] == first[19]
    assert batches(PromptStream(prompts(50), 8, seed=2, shuffle=True), 20) != first


def test_an_epoch_meets_every_prompt_at_most_once_and_batches_repeat_none():
    epoch_length = 50 // 8
    all_batches = batches(PromptStream(prompts(50), 8, seed=1, shuffle=True), 4 * epoch_length)
    order = [index for batch in all_batches for index in batch]
    epochs = [order[i : i + 48] for i in range(0, 4 * 48, 48)]
    assert all(len(set(epoch)) == len(epoch) == 48 for epoch in epochs)
    assert set().union(*epochs) == set(range(50))
    assert epochs[0] != epochs[1]


def test_unshuffled_batches_follow_the_rows_and_wrap_around():
    stream = PromptStream(prompts(5), 3, seed=1, shuffle=False)
    assert batches(stream, 3) == [[0, 1, 2], [3, 4, 0], [1, 2, 3]]


def test_batch_larger_than_the_data_is_refused():
    with pytest.raises(ValueError, match=r"takes 6 different prompts and the data has 5"):
        PromptStream(prompts(5), 6, seed=1, shuffle=True)
