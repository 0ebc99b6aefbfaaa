"""Requests and answers of the HTTP interfaces, as pure functions of JSON.

`generate` is SGLang's own (token ids both ways, exact counts in every event); `completions`, `chat` and `responses` are
OpenAI's and `messages` Anthropic's, where counts come in the usage and ids do not come at all. Those two newer ones
have no field that asks for answers of full length. `embeddings` have one answer, and no output tokens.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workloads.programs.call import Call, Prompt

GENERATE, COMPLETIONS, CHAT = "generate", "completions", "chat"
RESPONSES, MESSAGES, EMBEDDINGS = "responses", "messages", "embeddings"
PATHS: Mapping[str, str] = {
    GENERATE: "/generate",
    COMPLETIONS: "/v1/completions",
    CHAT: "/v1/chat/completions",
    RESPONSES: "/v1/responses",
    MESSAGES: "/v1/messages",
    EMBEDDINGS: "/v1/embeddings",
}
OF_CHATS = frozenset({CHAT, RESPONSES, MESSAGES})
"""They take text, which a template surrounds."""
WHOLE = frozenset({EMBEDDINGS})
TOKEN_BYTES = 4
"""Of a packed prompt."""
_USAGE = {"include_usage": True, "continuous_usage_stats": True}
_OF_RESPONSES = frozenset({"response.output_text.delta", "response.reasoning_text.delta"})
_PIECES = _OF_RESPONSES | {"content_block_delta"}
_ENDS = frozenset({"response.completed", "response.incomplete", "response.failed", "message_stop"})


def known_tokens(prompt: Prompt) -> int | None:
    """How many tokens a prompt has. None for text, of which only the server knows."""
    if isinstance(prompt, str):
        return None
    return len(prompt) // TOKEN_BYTES if isinstance(prompt, bytes) else len(prompt)


def pack(tokens: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


def _ids(prompt: tuple[int, ...] | bytes) -> list[int]:
    if isinstance(prompt, bytes):
        return list(struct.unpack(f"<{len(prompt) // TOKEN_BYTES}I", prompt))
    return list(prompt)


def body(
    kind: str, call: Call, *, model: str, ignore_eos: bool, temperature: float, user: str | None = None
) -> dict[str, Any]:
    """The JSON body that asks for `call`, streamed. `user` is OpenAI's field, where a name is to be sent in it.

    Raises ValueError where `kind` cannot express the call.
    """
    is_text, most = isinstance(call.prompt, str), call.max_output_tokens
    prompt = call.prompt if isinstance(call.prompt, str) else _ids(call.prompt)
    if kind == GENERATE:
        if user is not None:
            raise ValueError("generate has no field for the user: name clients in a header")
        sampling = {"max_new_tokens": most, "temperature": temperature, "ignore_eos": ignore_eos}
        return {"text" if is_text else "input_ids": prompt, "sampling_params": sampling, "stream": True}
    if kind in OF_CHATS and not is_text:
        raise ValueError(f"{kind} takes text, not token ids: give the programs a TextCodec")
    turns = [{"role": "user", "content": prompt}]
    made: dict[str, Any] = {"model": model}
    if user is not None:
        made |= {"metadata": {"user_id": user}} if kind == MESSAGES else {"user": user}
    if kind == EMBEDDINGS:
        return made | {"input": prompt}
    made |= {"temperature": temperature, "stream": True}
    if kind == RESPONSES:
        return made | {"input": turns, "max_output_tokens": most}
    made |= {"prompt": prompt} if kind == COMPLETIONS else {"messages": turns}
    own = {"stream_options": _USAGE} | ({"ignore_eos": True} if ignore_eos else {})
    return made | {"max_tokens": most} | ({} if kind == MESSAGES else own)


@dataclass
class Answer:
    """A streamed answer as far as it has come; `feed` takes the JSON of each event."""

    kind: str
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0
    finished: bool = False
    error: str | None = None

    def feed(self, event: Mapping[str, Any]) -> None:
        """One event of the stream. Raises KeyError, TypeError or ValueError if it is not of this kind."""
        if event.get("error") is not None or event.get("type") == "error":
            error = event.get("error") or event
            self.error = str(error.get("message", error) if isinstance(error, Mapping) else error)
        elif self.kind == GENERATE:
            self._generated(event)
        else:
            self._said(event)

    def _generated(self, event: Mapping[str, Any]) -> None:
        meta = event["meta_info"]
        self.prompt_tokens = meta.get("prompt_tokens", self.prompt_tokens)
        self.cached_tokens = meta.get("cached_tokens", self.cached_tokens)
        self.output_tokens = int(meta["completion_tokens"])
        ids, text = event.get("output_ids") or [], event.get("text") or ""
        # SGLang streams what it has so far, or, started with another option, only what is new.
        if len(ids) == self.output_tokens:
            self.tokens, self.text = list(ids), text
        else:
            self.tokens += ids
            self.text = text if not ids and text.startswith(self.text) else self.text + text
        reason = meta.get("finish_reason")
        self.finished |= reason is not None
        if isinstance(reason, Mapping) and reason.get("type") == "abort":
            self.error = f"aborted by the server: {reason.get('message', 'no reason given')}"

    def _said(self, event: Mapping[str, Any]) -> None:
        """An event of any other API. Each piece is at least one token; the usage tells how many."""
        kind, about = event.get("type"), event.get("response") or event.get("message") or event
        if kind in _PIECES:
            self.output_tokens += 1
            self.text += event["delta"] if kind in _OF_RESPONSES else event["delta"].get("text") or ""
        for choice in event.get("choices", ()):
            delta, reason = choice.get("delta") or {}, choice.get("finish_reason")
            piece = choice.get("text") or delta.get("content") or ""
            self.text += piece
            self.output_tokens += bool(piece or delta.get("reasoning_content") or delta.get("reasoning"))
            self.finished |= reason is not None
            self.error = "aborted by the server" if reason == "abort" else self.error
        self.finished |= kind in _ENDS or bool(event.get("data"))
        if kind == "response.failed":
            self.error = str((about.get("error") or {}).get("message", "failed"))
        if usage := about.get("usage"):
            self._count(usage, has_prompt=kind != "message_delta")

    def _count(self, usage: Mapping[str, Any], *, has_prompt: bool) -> None:
        """Anthropic's input leaves out what was cached, which is told beside it."""
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        beside = usage.get("cache_read_input_tokens", 0) if "input_tokens" in usage and not details else None
        prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
        if has_prompt and prompt is not None:
            self.prompt_tokens = prompt + (beside or 0)
            self.cached_tokens = (
                details.get("cached_tokens", self.cached_tokens) if beside is None else beside
            )
        self.output_tokens = (
            usage.get("completion_tokens") or usage.get("output_tokens") or self.output_tokens
        )
