"""From a request's text to the token ids that its replica will see, so that the router can compare prefixes.

The tokenizer's folder is read without `transformers`, whose import takes 2.4 s and 340 MB: `tokenizer.json` by the
`tokenizers` library, the chat template by jinja2, in the environment that transformers documents for chat templates.
Rendering follows what SGLang does before the template (`sglang/srt/entrypoints/openai/serving_chat.py`). A chat that
the template refuses is routed by its plain text: a wrong guess costs a cache hit, and the replica judges the request.
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from router.events import TOKEN_BYTES
from router.gateway.request.call import Call
from router.gateway.request.chunks import ChunkedTokenizer
from router.gateway.request.schema import Prompt
from router.wire import pack_tokens, unpack_tokens

log = logging.getLogger("gateway")

SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
MULTIMODAL = ("image", "audio", "video", "vision")

_PROBE_CHARS = 4096
_PROBES = (" ", "\n", "a", "ab ", "é", "e\N{COMBINING ACUTE ACCENT}", "東", "\0")
"""Texts that some normalizers and models shorten to nothing, or to one token, however long they are."""


class TokenizerError(ValueError):
    """The folder holds no tokenizer that the gateway can use: the operator's mistake."""


class TooLong(ValueError):
    """A prompt has more tokens than the model's context."""


def read_tokens(folders: Mapping[str, str]) -> dict[str, "Tokens"]:
    """The tokenizers of models, by name; models with one folder share it. Raises `TokenizerError`."""
    read: dict[Path, Tokens] = {}
    for folder in folders.values():
        path = Path(folder)
        if path.resolve() not in read:
            read[path.resolve()] = Tokens(path)
    return {name: read[Path(folder).resolve()] for name, folder in folders.items()}


class Tokens:
    """A tokenizer and its chat template. Thread-safe; encoding releases the GIL."""

    def __init__(self, folder: Path) -> None:
        """Reads `folder`. Raises `TokenizerError`."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"{folder} has no tokenizer.json")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise TokenizerError(f"{path}: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._chunks = ChunkedTokenizer(self._tokenizer)
        self._before, self._after = self._around()
        self._longest_chars = self._longest_token()
        config = _read_json(folder / "tokenizer_config.json")
        self._special = {name: _special(config[name]) for name in SPECIAL_TOKENS if config.get(name)}
        source = _template_source(folder, config)
        self._takes_parts = source is not None and _takes_parts(source)
        self._template = _compile(source) if source is not None else None
        self.plain_chats = 0
        """Chats that were routed by their plain text, because they could not be rendered."""

    def prompts(self, call: Call) -> tuple[Prompt, ...]:
        """The prompts of `call`: texts as they will be tokenized, or ids."""
        if call.kind == "chat" and not call.prompts:
            return (self._chat(call.body),)
        return call.prompts

    def has_few_uncached(self, prompts: Sequence[Prompt], most: int) -> bool:
        """Whether `pieces` would have to tokenize at most so many characters."""
        texts = [one for one in prompts if isinstance(one, str)]
        return sum(map(len, texts)) <= most or sum(map(self._chunks.uncached_chars, texts)) <= most

    def least_tokens(self, prompt: Prompt) -> int:
        """A lower bound of its tokens, from its length alone."""
        if not isinstance(prompt, str):
            return len(prompt)
        return 0 if self._longest_chars is None else len(prompt) // self._longest_chars

    def pieces(
        self, call: Call, prompts: tuple[Prompt, ...], most_tokens: int | None = None
    ) -> Iterator[bytes]:
        """The request's tokens for the router, a piece at a time: its prompts, one after the other.

        A batch goes to one worker as a whole. Its prompts are joined so that placement counts all its work; found
        in caches is then its first prompt, or the same batch. Raises `TooLong` as soon as a prompt has more than
        `most_tokens`.
        """
        for prompt in prompts:
            tokens = 0
            for piece in self._pieces(call, prompt):
                tokens += len(piece) // TOKEN_BYTES
                if most_tokens is not None and tokens > most_tokens:
                    raise TooLong
                yield piece

    def _pieces(self, call: Call, prompt: Prompt) -> Iterator[bytes]:
        if not isinstance(prompt, str):
            yield pack_tokens(prompt)
            return
        if self._before and call.kind != "chat":
            yield self._before
        yield from self._chunks.pieces(prompt)
        if self._after and call.kind != "chat":
            yield self._after

    def system_text(self, call: Call) -> str:
        """What the chat's messages of role system say. "" where the body brings its prompt's token ids."""
        if call.kind != "chat" or call.prompts:
            return ""
        said = (one.get("content") for one in call.body["messages"] if one.get("role") == "system")
        return "\n".join(map(_flat, said))

    def counts(self, text: str) -> Iterator[int]:
        """How many tokens the pieces of `text` have, without what a template adds."""
        return (len(piece) // TOKEN_BYTES for piece in self._chunks.pieces(text))

    def ids(self, call: Call) -> list[int]:
        """The same as a list of ids."""
        return unpack_tokens(b"".join(self.pieces(call, self.prompts(call))))

    def text(self, ids: Sequence[int], hide_special: bool = True) -> str:
        """The text of `ids`; `hide_special` leaves special tokens out."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=hide_special))

    def _around(self) -> tuple[bytes, bytes]:
        """The special tokens that the tokenizer adds before and after a text."""
        inner, whole = (
            list(self._tokenizer.encode("a", add_special_tokens=add).ids) for add in (False, True)
        )
        at = next((at for at in range(len(whole)) if whole[at : at + len(inner)] == inner), None)
        if at is None:
            return b"", b""
        return pack_tokens(whole[:at]), pack_tokens(whole[at + len(inner) :])

    def _longest_token(self) -> int | None:
        """How many characters of a text one token can stand for at most; None if there is no bound."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        if any(one.lstrip or one.rstrip for one in added):  # they take all space around them
            return None
        longest = max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)), default=0)
        for probe in _PROBES:
            [encoding] = self._tokenizer.encode_batch_fast([probe * _PROBE_CHARS], add_special_tokens=False)
            if len(encoding.ids) * longest < len(probe) * _PROBE_CHARS:
                return None
        return longest

    def _chat(self, body: dict[str, Any]) -> str:
        try:
            return self._render(body)
        except Exception as error:  # a template may raise anything, and the chat is its input
            self.plain_chats += 1
            if self.plain_chats == 1:
                log.warning("a chat is routed by its plain text (said once): %s", error)
            return "\n".join(_flat(message.get("content")) for message in body["messages"])

    def _render(self, body: dict[str, Any]) -> str:
        if self._template is None:
            raise TokenizerError("the tokenizer has no chat template")
        messages = [self._message(message) for message in body["messages"]]
        prefix = ""
        if messages[-1].get("role") == "assistant" and isinstance(messages[-1]["content"], str):
            if body.get("continue_final_message"):
                prefix = messages.pop()["content"]
            else:
                messages[-1] = messages[-1] | {"role": "user"}
        tools = body.get("tools") if body.get("tool_choice") != "none" else None
        extra = body.get("chat_template_kwargs") or {}
        if body.get("reasoning_effort") is not None:
            extra = {"reasoning_effort": body["reasoning_effort"]} | extra
        variables = {
            **self._special,
            "add_generation_prompt": True,
            **extra,
            "messages": messages,
            "tools": tools,
        }
        return str(self._template.render(**variables)) + prefix

    def _message(self, message: dict[str, Any]) -> dict[str, Any]:
        known = {key: value for key, value in message.items() if value is not None}
        content = known.get("content", "")
        return known | {"content": content if self._takes_parts else _flat(content)}


def _flat(content: Any) -> str:
    if isinstance(content, list):
        texts = [part.get("text", "") if isinstance(part, dict) else str(part) for part in content]
        return " ".join(text for text in texts if text)
    return "" if content is None else str(content)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path}: {error}") from error
    return found if isinstance(found, dict) else {}


def _special(value: Any) -> str:
    return str(value["content"]) if isinstance(value, dict) and "content" in value else str(value)


def _template_source(folder: Path, config: dict[str, Any]) -> str | None:
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
