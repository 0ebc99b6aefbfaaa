"""A model's chat template: from a chat to the text that its replica will tokenize.

jinja2 renders it in the environment that transformers documents for chat templates. What the template is given follows
SGLang 0.5.23 (`sglang/srt/entrypoints/openai/serving_chat.py`): messages with text alone are joined where the template
does not read parts, arguments of tool calls are objects, and a tool has the fields that SGLang's types give it.
"""

import json
import logging
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

log = logging.getLogger("gateway")

SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
MEDIA = ("image", "audio", "video")
MULTIMODAL = (*MEDIA, "vision")
THINKING = ("enable_thinking", "thinking")
"""Variables by which templates are told whether to think."""

_SENTINEL = "__in the middle__"


class ChatTemplate:
    """The template of one model, if it has one."""

    def __init__(self, source: str | None, special: Mapping[str, str]) -> None:
        """`special` are the tokens that templates name."""
        self._special = special
        self._takes_parts = source is not None and _takes_parts(source)
        self._template = _compile(source) if source is not None else None
        self._thinking = next((name for name in THINKING if name in (source or "")), None)
        self.inline_system = self._renders_inline_system()
        """A system message in the middle of a chat is rendered where it stands."""

    @staticmethod
    def of(folder: Path, config: Mapping[str, Any]) -> "ChatTemplate":
        """That of the tokenizer in `folder`; `config` is its `tokenizer_config.json`."""
        special = {name: _special(config[name]) for name in SPECIAL_TOKENS if config.get(name)}
        return ChatTemplate(_template_source(folder, config), special)

    def render(self, chat: Mapping[str, Any]) -> str:
        """The prompt. Raises whatever the template does, and ValueError where there is none."""
        if self._template is None:
            raise ValueError("the tokenizer has no chat template")
        messages = [self._message(message) for message in chat["messages"]]
        prefix = ""
        if messages[-1].get("role") == "assistant" and isinstance(messages[-1]["content"], str):
            if chat.get("continue_final_message"):
                prefix = messages.pop()["content"]
            else:
                messages[-1] = {"role": "user", "content": messages[-1]["content"]}
        extra = chat.get("chat_template_kwargs") or {}
        if chat.get("reasoning_effort") is not None:
            extra = {"reasoning_effort": chat["reasoning_effort"]} | extra
        if chat.get("thinking") is not None and self._thinking is not None:
            extra = extra | {self._thinking: chat["thinking"]}
        variables = {
            **self._special,
            "add_generation_prompt": True,
            **extra,
            "messages": messages,
            "tools": _offered(chat),
        }
        return str(self._template.render(**variables)) + prefix

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        known = {key: value for key, value in message.items() if value is not None}
        content = known.setdefault("content", "")
        if isinstance(content, list):
            known["content"] = self._parts(content, known.get("role"))
        if known.get("tool_calls"):
            known["tool_calls"] = [_with_arguments(call) for call in known["tool_calls"]]
        return known

    def _parts(self, content: list[Any], role: Any) -> Any:
        if not self._takes_parts:
            return flat(content)
        parts = [_plain(part) for part in content]
        if role == "tool" and all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
            return " ".join(part.get("text", "") for part in parts)
        return parts

    def _renders_inline_system(self) -> bool:
        roles = ("system", "user", "system", "user")
        messages = [{"role": role, "content": _SENTINEL if at == 2 else "t"} for at, role in enumerate(roles)]
        try:
            if self._template is None:
                return False
            return _SENTINEL in self._template.render(messages=messages, add_generation_prompt=False)
        except Exception:  # a template may raise anything
            return False


def flat(content: Any) -> str:
    if isinstance(content, list):
        texts = [part.get("text", "") if isinstance(part, dict) else str(part) for part in content]
        return " ".join(text for text in texts if text)
    return "" if content is None else str(content)


def _plain(part: Any) -> Any:
    """A part as templates know it: media without their data, text without anything else."""
    if not isinstance(part, dict):
        return part
    kind = str(part.get("type"))
    if kind in ("text", "input_text"):
        return {"type": "text", "text": part.get("text", "")}
    medium = next((medium for medium in MEDIA if kind in (f"{medium}_url", f"input_{medium}")), None)
    return part if medium is None else {"type": medium}


def _with_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    arguments = json.loads(function["arguments"])
    if not isinstance(arguments, dict):
        raise ValueError("the arguments of a tool call are not an object")
    return call | {"function": function | {"arguments": arguments}}


def _offered(chat: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The tools that the model is told of: all, none, or the one that it must call."""
    tools, choice = chat.get("tools"), chat.get("tool_choice")
    if not tools or choice == "none":
        return None
    if isinstance(choice, dict):
        named = (choice.get("function") or {}).get("name")
        tools = [tool for tool in tools if tool["function"]["name"] == named]
    return [_dumped(tool) for tool in tools] or None


def _dumped(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as SGLang's types write it: fields of the function as they came, and those that it may have behind."""
    deferred = tool.get("defer_loading")
    given = tool["function"]
    function = {"description": None, "name": None, "parameters": None} | {
        name: given[name]
        for name in ("description", "name", "parameters", "strict", "defer_loading")
        if given.get(name) is not None
    }
    if deferred is not None:
        function.setdefault("defer_loading", deferred)
    order = [name for name in given if name in function]
    ordered = {name: function[name] for name in [*order, *(name for name in function if name not in order)]}
    return {"type": tool.get("type", "function"), "function": ordered, "defer_loading": deferred}


def _special(value: Any) -> str:
    return str(value["content"]) if isinstance(value, dict) and "content" in value else str(value)


def _template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {one["name"]: one["template"] for one in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _environment() -> ImmutableSandboxedEnvironment:
    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent, **options)

    def strftime_now(form: str) -> str:
        return datetime.now().astimezone().strftime(form)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def _compile(source: str) -> jinja2.Template | None:
    try:
        return _environment().from_string(source)
    except jinja2.TemplateError as error:
        log.warning("the chat template cannot be read, chats are routed by their plain text: %s", error)
        return None


def _takes_parts(source: str) -> bool:
    """Whether the template iterates over the parts of a message; if not, they are joined to one text before it."""
    if any(word in source for word in MULTIMODAL):
        return True
    try:
        loops = _environment().parse(source).find_all(jinja2.nodes.For)
    except jinja2.TemplateError:
        return False
    return any(
        (isinstance(loop.iter, jinja2.nodes.Getitem) and getattr(loop.iter.arg, "value", None) == "content")
        or (isinstance(loop.iter, jinja2.nodes.Getattr) and loop.iter.attr == "content")
        for loop in loops
    )
