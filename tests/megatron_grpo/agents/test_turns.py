"""Observations as tokens: they continue a turn as the chat template would write it."""

import pytest

from checkpoint_convert.tokenizer import load_tokenizer
from helpers.models.images import picture, prompts_with_images, tiny_vision_model
from helpers.models.tiny import CHAT_TEMPLATE, EOS_ID, character_tokenizer
from helpers.runs.train import TINY_CONFIG
from megatron_grpo.agents.fork_pool import InstanceFailed
from megatron_grpo.agents.turns import ObservationTemplate, end_of_turn
from megatron_grpo.config.file import load_config
from megatron_grpo.data.prompts import Prompt

pytestmark = pytest.mark.waits

LLAMA_3 = (
    "{% for m in messages %}<start>{{ m.role }}<start>\n\n{{ m.content | trim }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant<start>\n\n{% endif %}"
)
MISTRAL = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}<eos>{% endif %}{% endfor %}"
)
# Drops the thoughts of earlier turns; tool messages have the role user.
QWEN_3 = (
    "{% for m in messages %}<start>{{ 'user' if m.role == 'tool' else m.role }}\n"
    "{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1] }}"
    "{% elif m.role == 'tool' %}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% else %}{{ m.content }}{% endif %}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n<think>\n{% endif %}"
)


def turns_of(template: str, *overrides: str, end_tokens: tuple = (EOS_ID,)) -> ObservationTemplate:
    tokenizer = character_tokenizer(250)
    tokenizer.chat_template = template
    return ObservationTemplate.from_config(
        load_config(TINY_CONFIG, overrides), tokenizer, end_tokens
    )


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, LLAMA_3, MISTRAL, QWEN_3])
def test_a_dialogue_continued_by_tokens_equals_the_templates_text(template):
    turns = turns_of(template)
    messages = [{"role": "user", "content": "ask"}]

    def rendered() -> list[int]:
        text = turns.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return turns.tokenizer(text, add_special_tokens=False)["input_ids"]

    prompt = rendered()
    said = turns.tokenizer("x = 1" if template is not MISTRAL else " x = 1")["input_ids"]
    observed, text = turns.encode_observation("no\nmore", EOS_ID)
    messages += [{"role": "assistant", "content": "x = 1"}, {"role": "user", "content": "no\nmore"}]
    whole = [*prompt, *said, EOS_ID, *observed]
    if template is QWEN_3:  # this template drops the thoughts of earlier turns
        assert rendered()[-len(observed) :] == [*observed]
    else:
        assert rendered() == whole
    assert turns.tokenizer.decode([EOS_ID, *observed]) == f"<eos>{text}"


THINKS = QWEN_3.replace("<think>\n", "{{ '<think>\n\n</think>\n' if not thinks }}")


@pytest.mark.parametrize(
    ("template", "override", "expected"),
    [
        (
            QWEN_3,
            "environment.observation_role=tool",
            "\n<start>user\n<tool_response>\n42\n</tool_response><eos>\n<start>assistant\n<think>\n",
        ),
        (
            THINKS,
            "data.chat_template_kwargs.thinks=false",
            "\n<start>user\n42<eos>\n<start>assistant\n<think>\n\n</think>\n",
        ),
        (
            THINKS,
            "data.chat_template_kwargs.thinks=true",
            "\n<start>user\n42<eos>\n<start>assistant\n",
        ),
        (CHAT_TEMPLATE, "data.apply_chat_template=false", "42"),
    ],
    ids=["a tool", "variables", "other variables", "no template"],
)
def test_encode_observation_follows_role_and_variables_of_the_config(template, override, expected):
    _, text = turns_of(template, override).encode_observation("42", EOS_ID)
    assert text == expected


@pytest.mark.parametrize(
    ("template", "overrides", "error"),
    [
        (MISTRAL, ["environment.observation_role=tool"], "refuses an observation .*'tool'.*altern"),
        (CHAT_TEMPLATE.replace("<eos>", ""), [], "does not close the model's turn with a token"),
        ("{{ messages[-1].content }}<eos>", [], "does not show each message of a dialogue once"),
    ],
)
def test_from_config_refuses_a_template_that_cannot_be_continued(template, overrides, error):
    with pytest.raises(ValueError, match=error):
        turns_of(template, *overrides)


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (CHAT_TEMPLATE, [EOS_ID]),
        (MISTRAL, [EOS_ID]),
        (CHAT_TEMPLATE.replace("<eos>", " <unk><eos>"), [2, EOS_ID]),
        (CHAT_TEMPLATE.replace("<eos>", "{{ '<eos>' if loop.last else '<unk>' }}"), [EOS_ID]),
        (CHAT_TEMPLATE.replace("<eos>", ""), []),
        ("{% for m in messages %}<start>{{ m.role }}{% endfor %}", []),  # writes no messages
        ("{% if messages | length > 1 %}{{ raise_exception('one') }}{% endif %}", []),
    ],
)
def test_end_of_turn_is_the_special_tokens_that_the_template_writes_after_it(template, end):
    tokenizer = character_tokenizer(250)
    tokenizer.chat_template = template
    assert end_of_turn(load_config(TINY_CONFIG).data, tokenizer) == end


def test_encode_observation_closes_a_turn_that_ended_without_the_template_s_end():
    stop = EOS_ID + 9
    by_string = turns_of(CHAT_TEMPLATE)
    closed, text = by_string.encode_observation("42", EOS_ID)
    by_token = turns_of(
        CHAT_TEMPLATE, f"rollout.stop_token_ids=[{stop}]", end_tokens=(EOS_ID, stop)
    )
    for turns in (by_string, by_token):
        assert turns.encode_observation("42", stop) == ((EOS_ID, *closed), f"<eos>{text}")
    named = turns_of(CHAT_TEMPLATE, f"rollout.stop_token_ids=[{EOS_ID}]", end_tokens=(7, EOS_ID))
    assert named.encode_observation("42", EOS_ID) == (closed, text)


def test_from_config_refuses_an_end_of_turn_that_ends_no_completion():
    with pytest.raises(ValueError, match=r"begins with token 1, and a completion ends with 7: add"):
        turns_of(CHAT_TEMPLATE, end_tokens=(7,))


def test_from_config_refuses_pieces_with_other_tokens_than_the_whole():
    turns = turns_of(CHAT_TEMPLATE)

    class Merging(type(turns.tokenizer)):
        """Merges the last turn of a dialogue into one token, but not its end alone."""

        def __call__(self, text, **kwargs):
            encoded = super().__call__(text, **kwargs)
            if text.startswith("<start>"):
                encoded["input_ids"][-3:] = [249]
            return encoded

    merging = Merging(tokenizer_object=turns.tokenizer.backend_tokenizer, eos_token="<eos>")
    merging.chat_template = CHAT_TEMPLATE
    with pytest.raises(ValueError, match="cannot be continued token by token"):
        ObservationTemplate.from_config(load_config(TINY_CONFIG), merging, (EOS_ID,))


def test_with_first_observation_appends_it_to_the_last_message():
    turns = turns_of(CHAT_TEMPLATE)
    parts = [{"type": "text", "text": "ask"}]
    chats = ([{"role": "user", "content": content}] for content in ("ask", parts))
    for asked in ("ask", *chats):
        prompt = turns.with_first_observation(
            Prompt(3, (4, 5), "x", {"prompt": asked, "answer": "1"}), " this"
        )
        assert prompt.text == "<start>user\nask this<eos>\n<start>assistant\n"
        assert [*prompt.token_ids] == turns.tokenizer(prompt.text)["input_ids"]
        assert (prompt.index, prompt.is_own) == (3, True)
        assert prompt.row["prompt"] == asked


def test_with_first_observation_keeps_the_images_where_they_are(tmp_path):
    model = tiny_vision_model(tmp_path / "model")
    picture(60, 90).save(tmp_path / "0.png")
    [prompt] = prompts_with_images(model, tmp_path, ["0.png"])
    turns = ObservationTemplate(prompt.data, load_tokenizer(model))
    longer = turns.with_first_observation(prompt, " Look closely.")
    [(_, begin)], [count] = prompt.images.places, prompt.images.counts
    assert longer.token_ids[: begin + count] == prompt.token_ids[: begin + count]
    assert len(longer.token_ids) > len(prompt.token_ids) and longer.images == prompt.images
    with pytest.raises(InstanceFailed, match="has <image> in its text"):
        turns.with_first_observation(prompt, "<image>")
