"""Anthropic's /v1/messages: its request bodies to OpenAI's, and turns to its answers."""

import json
import reprlib
from collections.abc import Iterator
from typing import Any

from megatron_grpo.agents.chat import BadRequest, as_object
from megatron_grpo.agents.openai_api import Answered, Json
from megatron_grpo.data.messages import arguments_of
from megatron_grpo.unicode import as_unicode

SAME = ("max_tokens", "stream", "temperature", "top_p", "top_k", "model", "metadata")
"""Fields that OpenAI's requests share."""
SUPPORTED = "use text, image, thinking, tool_use and tool_result"
ONLY_ITS_MODEL = "only the model that wrote it can read it; leave it out"
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def as_chat(body: Json) -> Json:
    """Convert a request to /v1/chat/completions; raises BadRequest for content that has no form.

    `tool_result` blocks become messages of the role `tool`, thinking becomes `reasoning_content`.
    """
    messages: list[Json] = []
    if system := body.get("system"):
        messages.append({"role": "system", "content": system})
    for message in _objects("messages", body.get("messages")):
        messages += _chat_messages(message)
    tools = [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": tool.get("description", ""),
                "parameters": tool.get("input_schema", {}),
            },
        }
        for tool in _objects("tools", [] if body.get("tools") is None else body["tools"])
    ]
    choice = body.get("tool_choice") or {"type": "auto"}
    if not isinstance(choice, dict):
        raise BadRequest(f"tool_choice must be an object, not {reprlib.repr(choice)}")
    return {
        "messages": messages,
        "tools": tools,
        "tool_choice": choice["type"],
        "stop": body.get("stop_sequences"),
        **{name: body.get(name) for name in SAME},
    }


def _objects(name: str, value: Any) -> list[Json]:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise BadRequest(f"{name} must be a list of objects, not {reprlib.repr(value)}")
    return value


def _chat_messages(message: Json) -> Iterator[Json]:
    role = message["role"]
    if isinstance(message["content"], str):
        yield {"role": role, "content": message["content"]}
        return
    parts, thinking, calls = [], [], []
    blocks = _objects("content", message["content"])
    for block in blocks:
        kind = block["type"]
        if kind in ("text", "image"):
            parts.append(_part(block))
        elif kind == "thinking":
            thinking.append(block["thinking"])
        elif kind == "tool_use":
            function = {"name": block["name"], "arguments": json.dumps(block["input"])}
            calls.append({"id": block["id"], "type": "function", "function": function})
        elif kind == "tool_result":
            result = block.get("content")
            content = [*map(_part, result)] if isinstance(result, list) else result
            yield {"role": "tool", "tool_call_id": block["tool_use_id"], "content": content}
        else:
            advice = ONLY_ITS_MODEL if kind == "redacted_thinking" else SUPPORTED
            raise BadRequest(f"content of type {kind} is not supported: {advice}")
    # `not blocks`: an empty turn of the model comes back as a message without blocks, and is a
    # message of the history. A message of tool results alone has been yielded already.
    if parts or thinking or calls or not blocks:
        found: Json = {"role": role, "content": parts}
        if thinking:
            found["reasoning_content"] = "".join(thinking)
        if calls:
            found["tool_calls"] = calls
        yield found


def _part(block: Json) -> Json:
    """A block of text, or of an image by its base64 or address, in OpenAI's form."""
    if block["type"] != "image":
        return block
    source = block["source"]
    return {"type": "image_url", "image_url": source.get("data") or source.get("url")}


def answer(turn: Answered, model: str, name: str) -> Json:
    return {
        "id": name,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": _blocks(turn),
        "stop_reason": STOP_REASONS[turn.finish_reason],
        "stop_sequence": None,
        "usage": {"input_tokens": turn.num_prompt, "output_tokens": turn.num_sampled},
    }


def events(turn: Answered, model: str, name: str) -> Iterator[Json]:
    """Stream the `answer` as events, one delta for each block."""
    whole = answer(turn, model, name)
    usage = whole["usage"]
    begun = {**whole, "content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 0}}
    yield {"type": "message_start", "message": begun}
    for index, block in enumerate(whole["content"]):
        empty, delta = _as_delta(block)
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    ended = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    yield {"type": "message_delta", "delta": ended, "usage": usage}
    yield {"type": "message_stop"}


def error_body(text: str, kind: str, code: str | None = None) -> Json:
    return {"type": "error", "error": {"type": kind, "message": text}}


def _blocks(turn: Answered) -> list[Json]:
    message, blocks = turn.message, list[Json]()
    if reasoning := message.get("reasoning"):
        # Thinking blocks have a signature in Anthropic's API; this endpoint checks none.
        blocks.append({"type": "thinking", "thinking": reasoning, "signature": ""})
    if message["content"]:
        blocks.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls") or ():
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        given = as_object(as_unicode(arguments_of(arguments)))
        blocks.append({"type": "tool_use", "id": call["id"], "name": name, "input": given})
    return blocks


def _as_delta(block: Json) -> tuple[Json, Json]:
    if block["type"] == "text":
        return {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
    if block["type"] == "thinking":
        return {**block, "thinking": ""}, {"type": "thinking_delta", "thinking": block["thinking"]}
    delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
    return {**block, "input": {}}, delta
