"""Messages of agents in real families' templates: sampled turns keep their tokens."""

import json
from dataclasses import replace

import pytest

from helpers.models.tiny import EOS_ID, character_tokenizer
from megatron_grpo.agents import anthropic_api
from megatron_grpo.agents.chat import (
    BadRequest,
    ChatTemplate,
    Start,
    Turn,
    check_calls,
    digests,
    image_digest,
    messages_of,
)
from megatron_grpo.agents.openai_api import MOST_CHOICES, Answered, Options
from megatron_grpo.agents.token_tree import Place

HEAD = (
    "{% for m in messages %}<start>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
)
TAIL = "{% endfor %}<eos>{% endfor %}{% if add_generation_prompt %}<start>assistant\n{% endif %}"
CALLS = {
    "hermes": "<call>{{ c.function.name }}{{ c.function.arguments | tojson }}",
    "qwen3_coder": "<call>{{ c.function.name }}"
    "{% for name, value in c.function.arguments | items %}<{{ name }}>{{ value }}{% endfor %}",
    "glm": "<call>{{ c.function.name }}"
    "{% for name, value in c.function.arguments.items() %}<{{ name }}>{{ value }}{% endfor %}",
    "kimi_k2": "<call>{{ c.function.name }}{% if c.function.arguments is string %}"
    "{{ c.function.arguments }}{% else %}{{ c.function.arguments | tojson }}{% endif %}",
    "deepseek_v3": "{{ '<call>' + c.function.name + '\\n' + c.function.arguments }}",
}
"""How families write a call: from an object, from a text, or from either."""
GOOD = ('{"a": 1, "b": 2}', "", '{"text": "\\ud83d"}')
BROKEN = ('{"a": 1, "b": ', "[1, 2]", '"{}"', "null", "{'a': 1}", " ", "[" * 100_000)
BROKEN += ('{"a": NaN}', '{"a": 1e999}')  # not JSON
ASKED = [{"role": "user", "content": "1+2?"}]
RESULT = {"role": "tool", "tool_call_id": "1", "content": "Error"}


def template_of(call):
    tokenizer = character_tokenizer(200)
    tokenizer.chat_template = HEAD + call + TAIL
    return ChatTemplate(tokenizer, {}, "<eos>", frozenset({EOS_ID}), frozenset({EOS_ID}))


def call_of(arguments):
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def turn_after(template, history, message, text):
    """A model's turn: `message` is the engine's parse of `text`."""
    given = messages_of(history, {})
    check_calls(given, [])
    prompt = template.render(given, None, is_prompt=True)
    start, end = (Place(0, len(template.encode(each))) for each in (prompt, prompt + text))
    [answer] = messages_of([message], {})
    turn = Turn(digests(given, None), answer, Start.of(prompt), text, start, end, EOS_ID)
    return replace(turn, end=Place(0, end.length + 1))


@pytest.mark.parametrize("family", CALLS)
@pytest.mark.parametrize("arguments", [*GOOD, *BROKEN], ids=lambda text: text[:12])
def test_find_continues_a_call_with_any_arguments(family, arguments):
    template = template_of(CALLS[family])
    message = call_of(arguments)
    turn = turn_after(template, ASKED, message, f"<call>add {arguments}")
    [block] = anthropic_api.answer(Answered(message, "tool_calls", 1, 1, ()), "m", "n")["content"]
    assert isinstance(block["input"], dict)
    as_anthropic = anthropic_api.as_chat(
        {
            "messages": [
                *ASKED,
                {"role": "assistant", "content": json.loads(json.dumps([block], allow_nan=False))},
            ]
        }
    )["messages"]
    again = {**call_of('{"b": 3}'), "content": "again"}
    for history in ([*ASKED, message], as_anthropic):
        for more, rest in (
            ([], ""),
            ([RESULT], "<start>tool\nError<eos>"),
            ([RESULT, again], "<start>tool\nError<eos><start>assistant\nagain"),
        ):
            given = messages_of([*history, *more], {})
            check_calls(given, [turn])
            text = template.render(given, None, is_prompt=True)
            found = template.find([turn], given, None, text)
            assert found.place == turn.end
            assert found.rest.startswith(rest + ("" if again in more else "<start>assistant\n"))
            assert "\ud83d" not in text


@pytest.mark.parametrize("arguments", BROKEN, ids=lambda text: text[:12])
def test_check_calls_refuses_arguments_that_are_no_object_unless_the_model_wrote_them(arguments):
    template = template_of(CALLS["hermes"])
    made = [turn_after(template, ASKED, call_of(arguments), "x")]
    given = messages_of([*ASKED, call_of(arguments), RESULT], {})
    check_calls(given, made)  # also in another history
    for turns in ([], [turn_after(template, ASKED, call_of("{]"), "x")]):
        with pytest.raises(
            BadRequest, match="arguments of a call of add must be an object in JSON"
        ):
            check_calls(given, turns)


@pytest.mark.parametrize("given", [None, {}, "", "{}"])
def test_messages_of_a_call_without_arguments_have_an_object_without_fields(given):
    [message] = messages_of([call_of(given)], {})
    assert message["tool_calls"][0]["arguments"] == {}


@pytest.mark.parametrize("text", ["", " \n"])
def test_find_continues_a_turn_without_text(text):
    template = template_of(CALLS["hermes"])
    turn = turn_after(template, ASKED, {"role": "assistant", "content": text}, text)
    for content in (text, None, []):
        message = {"role": "assistant", "content": content}
        anthropics = {"messages": [{**message, "content": content or []}]}
        [as_chat] = anthropic_api.as_chat(anthropics)["messages"]
        for echo in (message, as_chat):
            given = messages_of([*ASKED, echo, {"role": "user", "content": "and?"}], {})
            found = template.find([turn], given, None, template.render(given, None, is_prompt=True))
            assert found.place == turn.end
            assert found.rest == "<start>user\nand?<eos><start>assistant\n"


def test_an_image_in_anthropics_form_is_that_of_the_row():
    source = {"type": "base64", "media_type": "image/png", "data": "QUJD"}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "Which?"}]
    given = anthropic_api.as_chat({"messages": [{"role": "user", "content": content}]})["messages"]
    [message] = messages_of(given, {image_digest("data:image/png;base64,QUJD"): 1})
    assert message["content"] == [{"type": "image", "image": 1}, {"type": "text", "text": "Which?"}]


def test_a_request_for_more_choices_than_the_endpoint_has_room_for_is_refused():
    assert Options.of({"n": MOST_CHOICES}).num == MOST_CHOICES
    with pytest.raises(BadRequest, match="n 1000000000 must be at most 128"):
        Options.of({"n": 1_000_000_000})
