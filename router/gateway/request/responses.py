"""A request of OpenAI's Responses API as the chat that SGLang 0.5.23 makes of it (`openai/serving_responses.py`).

Models that SGLang talks to in a format of their own (gpt-oss, Beam, Muse) are rendered otherwise there; for these the
router's guess is that of a plain chat.
"""

import base64
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Message = dict[str, Any]

_REASONING = "sglang-reasoning-v1."
"""How SGLang marks reasoning that a client keeps for it."""
_MOST_REASONING_BYTES = 1 << 22
"""No more is unpacked, whatever a client sends."""
_DEVELOPER = "Developer instructions:"
_CUSTOM_INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": ["input"],
    "additionalProperties": False,
}


def chat_of(body: Mapping[str, Any], inline_system: bool) -> dict[str, Any]:
    """`messages`, `tools`, `tool_choice` and what the template is told. `inline_system`: the template takes system
    messages in the middle of a chat; else they join the first one."""
    given = body["input"]
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    messages: list[Message] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    messages += [message for item in items if (message := _message(item)) is not None]
    messages = _merged(messages)
    chat: dict[str, Any] = {"messages": messages if inline_system else _system_first(messages)}
    if tools := [found for tool in body.get("tools") or () if (found := _tool(tool)) is not None]:
        chat["tools"] = tools
        chat["tool_choice"] = _choice(body.get("tool_choice"))
    if body.get("chat_template_kwargs"):
        chat["chat_template_kwargs"] = body["chat_template_kwargs"]
    if isinstance(reasoning := body.get("reasoning"), Mapping):
        effort = reasoning.get("effort", "medium")
        chat["reasoning_effort"] = effort
        if effort == "none":
            given_kwargs = chat.get("chat_template_kwargs") or {}
            chat["chat_template_kwargs"] = {"thinking": False, "enable_thinking": False, **given_kwargs}
    return chat


def _message(item: Mapping[str, Any]) -> Message | None:
    match item.get("type"):
        case "function_call":
            return _calls(item, _arguments(item.get("arguments")))
        case "custom_tool_call":
            return _calls(item, json.dumps({"input": item.get("input") or ""}, ensure_ascii=False))
        case "function_call_output" | "custom_tool_call_output":
            said = item.get("output", "")
            if isinstance(said, list):
                said = "".join(part.get("text", "") for part in said if isinstance(part, dict))
            return {"role": "tool", "tool_call_id": item.get("call_id"), "content": said}
        case "reasoning":
            text = _reasoning(item)
            return {"role": "assistant", "reasoning_content": text} if text else None
        case None | "message":
            return _said(item)
    return None  # the replica refuses it


def _said(item: Mapping[str, Any]) -> Message:
    role, content = item.get("role"), item.get("content")
    if role == "developer":
        role, content = "system", _labelled(content)
    if isinstance(content, list):
        content = [_part(part) for part in content]
    more = {key: item[key] for key in ("name", "phase") if item.get(key) is not None}
    return {"role": role, **({} if content is None else {"content": content}), **more}


def _labelled(content: Any) -> Any:
    """A developer's text becomes the system's, and says so."""
    if isinstance(content, str):
        return f"{_DEVELOPER}\n{content}"
    if not isinstance(content, list):
        return content
    for index, part in enumerate(content):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            labelled = part | {"text": f"{_DEVELOPER}\n{part['text']}"}
            return [*content[:index], labelled, *content[index + 1 :]]
    return [{"type": "input_text", "text": _DEVELOPER}, *content]


def _part(part: Any) -> Any:
    if not isinstance(part, dict):
        return part
    if part.get("type") in ("input_text", "output_text"):
        return {"type": "text", "text": part.get("text", "")}
    return {"type": "image_url"} if part.get("type") == "input_image" else part


def _calls(item: Mapping[str, Any], arguments: str) -> Message:
    function = {"name": item.get("name"), "arguments": arguments}
    call = {"id": item.get("call_id") or item.get("id"), "type": "function", "function": function}
    return {"role": "assistant", "tool_calls": [call]}


def _arguments(given: Any) -> str:
    """An object, in JSON; anything else counts as none."""
    if isinstance(given, Mapping):
        return json.dumps(given)
    try:
        return given if isinstance(given, str) and isinstance(json.loads(given), dict) else "{}"
    except ValueError:
        return "{}"


def _reasoning(item: Mapping[str, Any]) -> str:
    for name in ("summary", "content"):
        parts = item.get(name)
        texts = [str(one.get("text") or "") for one in parts or () if isinstance(one, dict)]
        if joined := "\n".join(text for text in texts if text):
            return joined
    kept = item.get("encrypted_content")
    if not isinstance(kept, str) or not kept.startswith(_REASONING):
        return ""
    try:
        raw = base64.urlsafe_b64decode(kept.removeprefix(_REASONING))
        return zlib.decompressobj().decompress(raw, _MOST_REASONING_BYTES).decode("utf-8", "ignore")
    except (ValueError, zlib.error):
        return ""


def _merged(messages: Sequence[Message]) -> list[Message]:
    """One turn of the assistant comes as several items, and is one message of a chat."""
    merged: list[Message] = []
    for message in messages:
        before = merged[-1] if merged else {}
        is_next = message["role"] == before.get("role") == "assistant" and (
            before.get("phase") == message.get("phase") or set(before) == {"role", "reasoning_content"}
        )
        if not is_next:
            merged.append(message)
            continue
        both = {**before, **{key: message[key] for key in ("phase",) if key in message}}
        if message.get("content") not in (None, ""):
            both["content"] = _both_contents(before.get("content"), message["content"])
        if message.get("tool_calls"):
            both["tool_calls"] = [*(before.get("tool_calls") or ()), *message["tool_calls"]]
        if thought := message.get("reasoning_content"):
            both["reasoning_content"] = "\n".join(filter(None, (before.get("reasoning_content"), thought)))
        merged[-1] = both
    return merged


def _both_contents(before: Any, after: Any) -> Any:
    if before in (None, ""):
        return after
    if isinstance(before, str) and isinstance(after, str):
        return f"{before}\n\n{after}"
    return [*_as_parts(before), *_as_parts(after)]


def _as_parts(content: Any) -> list[Any]:
    return list(content) if isinstance(content, list) else [{"type": "text", "text": content}]


def _system_first(messages: Sequence[Message]) -> list[Message]:
    texts = [text for one in messages if one["role"] == "system" for text in _texts(one.get("content"))]
    others = [one for one in messages if one["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others] if texts else others


def _texts(content: Any) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            yield part["text"]


def _tool(tool: Mapping[str, Any]) -> dict[str, Any] | None:
    description, parameters = tool.get("description"), tool.get("parameters")
    if tool.get("type") == "custom" and tool.get("name"):
        form = tool.get("format")
        told = [description] if description else []
        if isinstance(form, Mapping) and form.get("type") == "grammar":
            syntax, definition = form.get("syntax") or "lark", form.get("definition") or ""
            told.append(f"The payload must conform to this {syntax} grammar:\n{definition}")
        description, parameters = "\n\n".join(told) or None, _CUSTOM_INPUT
    elif tool.get("type") != "function":
        return None
    function = {
        "name": tool.get("name"),
        "description": description,
        "parameters": parameters,
        "strict": bool(tool.get("strict", False)),
    }
    return {"type": "function", "function": function}


def _choice(choice: Any) -> Any:
    if not isinstance(choice, Mapping):
        return choice or "auto"
    name = choice.get("name") or (choice.get("function") or {}).get("name")
    if choice.get("type") in ("function", "custom") and name:
        return {"type": "function", "function": {"name": name}}
    return "auto"
