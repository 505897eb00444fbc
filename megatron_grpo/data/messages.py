"""Chat messages of data and agents: OpenAI's forms, and how tables store them."""

import json
from typing import Any

TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of content parts that are text, and the field with the text."""
IMAGE_MARK = "<image>"
"""Placeholder of an image in the texts of many data sets, and in logs."""


def text_of(content: Any) -> str:
    """Join the text of a message's content, which is a text, null, or a list of text parts. Raises
    ValueError with the reason for any other content."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong_content(type(content).__name__)
    return "".join(map(_text_of_part, content))


def _text_of_part(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    field = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if field is None:
        raise _wrong_content(f"a part of type {kind}")
    if not isinstance(part.get(field), str):
        raise _wrong_content(f"a part of type {kind} whose {field} is no text")
    return str(part[field])


def _wrong_content(what: str) -> ValueError:
    return ValueError(
        f"the content of a message must be a text, or a list of parts of type text, not {what}"
    )


def shown_text(content: str | list[dict[str, Any]]) -> str:
    """Text of a content for chat templates, with a mark for each image."""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", IMAGE_MARK) for part in content)


def message_of_data(given: Any) -> dict[str, Any]:
    """Convert a row's message for chat templates: content to text, arguments of calls to tables.
    Content may be null only with tool calls. Raises ValueError for an invalid message."""
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        raise ValueError("a message must be a table with a role")
    content = given.get("content")
    if content is None and not given.get("tool_calls"):
        raise ValueError("the content of a message may be null beside tool_calls only")
    message = {**given, "content": text_of(content)}
    if isinstance(calls := given.get("tool_calls"), list):
        message["tool_calls"] = [_with_table(call) for call in calls]
    return message


def _with_table(call: Any) -> Any:
    """Parse a call's arguments from OpenAI's JSON text, which templates would quote again. Other
    text stays: a model may have called a tool with it."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(text := function.get("arguments"), str):
        return call
    return {**call, "function": {**function, "arguments": arguments_of(text)}}


def arguments_of(text: str) -> dict[str, Any] | str:
    """Parse the arguments of a call; a text that is no JSON object is returned unchanged.

    >>> arguments_of('{"a": 1}'), arguments_of("[1]"), arguments_of("")
    ({'a': 1}, '[1]', {})
    """
    parsed = json_value(text or "{}")
    return parsed if isinstance(parsed, dict) else text


def json_value(text: str) -> Any:
    """Parse JSON, which has no NaN and no infinity; any other text is returned unchanged."""
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return text
    return value


def without_nulls(value: Any) -> Any:
    """Remove null fields from the messages of a row, at every level. A table gives each struct the
    fields of all others, as null, and templates test for a field's presence."""
    if isinstance(value, dict):
        return {name: without_nulls(each) for name, each in value.items() if each is not None}
    if isinstance(value, list):
        return [without_nulls(each) for each in value]
    return value
