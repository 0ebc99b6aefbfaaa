"""A request of Anthropic's Messages API as the chat that SGLang 0.5.23 makes of it (`anthropic/serving.py`).

Two things depend on how a replica was started, and are guessed: without a reasoning parser SGLang drops earlier
thinking from the conversation, as here; and which variable of the template switches thinking on. A wrong guess costs a
cache hit.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

Parts = list[dict[str, Any]]


def chat_of(body: Mapping[str, Any], inline_system: bool) -> dict[str, Any]:
    """`messages`, `tools`, `tool_choice` and what the template is told. `inline_system`: the template takes system
    messages in the middle of a chat; else they join the first one."""
    chat: dict[str, Any] = {"messages": list(_messages(body, inline_system))}
    tools = [_tool(tool) for tool in body.get("tools") or () if "input_schema" in tool]
    choice = body.get("tool_choice") or {}
    if tools:
        chat["tools"] = tools
        if choice.get("type") == "none":
            chat["tool_choice"] = "none"
        elif choice.get("type") == "tool":
            chat["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    effort = (body.get("output_config") or {}).get("effort")
    if effort is not None:
        chat["reasoning_effort"] = "max" if effort == "xhigh" else effort
    thinking = body.get("thinking")
    if isinstance(thinking, Mapping):
        chat["thinking"] = thinking.get("type") != "disabled"
    return chat


def _messages(body: Mapping[str, Any], inline_system: bool) -> Iterator[dict[str, Any]]:
    system = list(_system_texts(body.get("system")))
    said = body["messages"]
    if not inline_system:
        system += [text for one in said if one.get("role") == "system" if (text := _text(one.get("content")))]
        said = [one for one in said if one.get("role") != "system"]
    if system:
        yield {"role": "system", "content": "\n".join(system)}
    for one in said:
        content = one.get("content")
        if isinstance(content, list):
            yield from _turn(str(one.get("role")), [block for block in content if isinstance(block, dict)])
        else:
            yield {"role": one.get("role"), "content": content}


def _system_texts(system: Any) -> Iterator[str]:
    if isinstance(system, str):
        if system.strip():
            yield system
    else:
        for block in system or ():
            if block.get("type") == "text" and block.get("text"):
                yield block["text"]


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content.strip()
    blocks = content if isinstance(content, list) else ()
    texts = [str(one.get("text") or "").strip() for one in blocks if one.get("type") == "text"]
    return "\n".join(text for text in texts if text)


def _turn(role: str, blocks: Parts) -> Iterator[dict[str, Any]]:
    """The messages of one turn: results of tools stand by themselves, where they stood."""
    parts: Parts = []
    calls: list[dict[str, Any]] = []
    had_result = False
    for block in blocks:
        match block.get("type"):
            case "text" if block.get("text") is not None:
                parts.append({"type": "text", "text": block["text"]})
            case "image":
                parts.append({"type": "image_url"})
            case "search_result" if found := _search_result(block):
                parts.append({"type": "text", "text": found})
            case "tool_use":
                calls.append(_call(block))
            case "tool_result" if role == "user":
                if parts:
                    yield {"role": "user", "content": _joined(parts)}
                    parts = []
                had_result = True
                result = {"role": "tool", "tool_call_id": block.get("tool_use_id") or block.get("id") or ""}
                for content in _results(block.get("content")):
                    yield result | {"content": content}
            case "tool_result":
                texts = [text for text in _results(block.get("content")) if isinstance(text, str)]
                parts.append({"type": "text", "text": "Tool result: " + "\n".join(texts)})
    message: dict[str, Any] = {"role": role}
    if calls:
        message["tool_calls"] = calls
    if parts:
        yield message | {"content": _joined(parts)}
    elif calls:
        yield message
    elif role != "user" and not had_result:
        yield message | {"content": ""}


def _joined(parts: Parts) -> str | Parts:
    if len(parts) == 1 and parts[0]["type"] == "text":
        return str(parts[0]["text"])
    return parts


def _call(block: Mapping[str, Any]) -> dict[str, Any]:
    arguments = json.dumps(block.get("input") or {})
    function = {"name": block.get("name") or "", "arguments": arguments}
    return {"id": block.get("id"), "type": "function", "function": function}


def _results(content: Any) -> list[str | Parts]:
    """What a tool said, as the contents of one message or several: references to tools stand alone."""
    if not isinstance(content, list):
        return [str(content) if content else ""]
    groups: list[Parts] = []
    for part in filter(None, map(_result_part, content)):
        is_reference = part["type"] == "tool_reference"
        if not groups or (groups[-1][0]["type"] == "tool_reference") != is_reference:
            groups.append([])
        groups[-1].append(part)
    return [_joined(group) for group in groups] or [""]


def _result_part(item: Any) -> dict[str, Any] | None:
    if not isinstance(item, Mapping):
        return None
    match item.get("type"):
        case "text" if item.get("text"):
            return {"type": "text", "text": item["text"]}
        case "image":
            return {"type": "image_url"}
        case "tool_reference" if name := item.get("tool_name") or item.get("name"):
            return {"type": "tool_reference", "name": name}
        case "search_result" if text := _search_result(item):
            return {"type": "text", "text": text}
    return None


def _search_result(item: Mapping[str, Any]) -> str:
    source = item.get("source")
    if isinstance(source, Mapping):
        source = source.get("url") or source.get("text")
    content = item.get("content")
    texts = [content] if isinstance(content, str) else []
    if isinstance(content, list):
        texts = [one["text"] for one in content if isinstance(one, Mapping) and one.get("text")]
    said = {"Title": item.get("title"), "Source": source, "Content": "\n".join(texts)}
    return "\n".join(f"{name}: {text}" for name, text in said.items() if text)


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    schema = tool["input_schema"]
    function = {
        "name": tool.get("name"),
        "description": tool.get("description") or "",
        "parameters": schema
        if not isinstance(schema, dict) or "type" in schema
        else schema | {"type": "object"},
        "strict": bool(tool.get("strict", False)),
    }
    return {"type": "function", "function": function, "defer_loading": tool.get("defer_loading")}
