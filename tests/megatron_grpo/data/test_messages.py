import pytest

from megatron_grpo.data.messages import message_of_data, text_of


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a", "a"),
        (None, ""),
        ([], ""),
        ([{"type": "text", "text": "a "}, {"type": "text", "text": "b", "image_url": None}], "a b"),
        ([{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b"}], "ab"),
        ([{"type": "refusal", "refusal": "No."}], "No."),
    ],
)
def test_openais_forms_of_a_text_are_texts(content, text):
    assert text_of(content) == text


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (3, "not int"),
        ({"type": "text", "text": "a"}, "not dict"),
        (["a"], "not a part of type None"),
        ([{"text": "a"}], "not a part of type None"),
        ([{"type": ["text"], "text": "a"}], r"not a part of type \['text'\]"),
        ([{"type": "text", "text": None}], "not a part of type text whose text is no text"),
        ([{"type": "image_url", "image_url": {"url": "x"}}], "not a part of type image_url"),
    ],
)
def test_any_other_content_is_refused_with_the_reason(content, error):
    with pytest.raises(ValueError, match=f"a list of parts of type text, {error}$"):
        text_of(content)


def test_a_content_is_null_only_with_tool_calls():
    calls = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    said = {"role": "assistant", "content": None, "tool_calls": calls}
    assert message_of_data(said) == {**said, "content": ""}
    assert message_of_data({"role": "assistant", "tool_calls": calls})["content"] == ""
    for message in (
        {**said, "tool_calls": []},
        {"role": "user"},
        {"role": "user", "content": None},
    ):
        with pytest.raises(ValueError, match="null beside tool_calls only"):
            message_of_data(message)


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        ('{"city": "Bern", "at": null}', {"city": "Bern", "at": None}),
        ("", {}),
        ({"city": "Bern"}, {"city": "Bern"}),
        ('{"city": ', '{"city": '),
        ("[1]", "[1]"),
    ],
)
def test_arguments_in_json_text_are_tables_for_the_template(given, arguments):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": given}}
    [found] = message_of_data({"role": "assistant", "tool_calls": [call]})["tool_calls"]
    assert found == {**call, "function": {"name": "f", "arguments": arguments}}
