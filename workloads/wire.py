"""Requests and streamed answers of the three HTTP interfaces, as pure functions of JSON.

`generate` is SGLang's own (token ids both ways, exact counts in every event); `completions` and `chat` are
OpenAI's, where counts come in the usage and ids do not come at all.
"""

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workloads.programs.call import Call, Prompt

GENERATE, COMPLETIONS, CHAT = "generate", "completions", "chat"
PATHS: Mapping[str, str] = {
    GENERATE: "/generate",
    COMPLETIONS: "/v1/completions",
    CHAT: "/v1/chat/completions",
}
TOKEN_BYTES = 4
"""Of a packed prompt."""
_USAGE = {"include_usage": True, "continuous_usage_stats": True}


def known_tokens(prompt: Prompt) -> int | None:
    """How many tokens a prompt has. None for text, of which only the server knows."""
    if isinstance(prompt, str):
        return None
    return len(prompt) // TOKEN_BYTES if isinstance(prompt, bytes) else len(prompt)


def pack(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32."""
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
    if kind == GENERATE:
        if user is not None:
            raise ValueError("generate has no field for the user: name clients in a header")
        prompt = {"text": call.prompt} if isinstance(call.prompt, str) else {"input_ids": _ids(call.prompt)}
        sampling = {
            "max_new_tokens": call.max_output_tokens,
            "temperature": temperature,
            "ignore_eos": ignore_eos,
        }
        return {**prompt, "sampling_params": sampling, "stream": True}
    common = {
        "model": model,
        "max_tokens": call.max_output_tokens,
        "temperature": temperature,
        "stream": True,
        "stream_options": _USAGE,
        **({"ignore_eos": True} if ignore_eos else {}),
        **({} if user is None else {"user": user}),
    }
    if kind == COMPLETIONS:
        return {**common, "prompt": call.prompt if isinstance(call.prompt, str) else _ids(call.prompt)}
    if kind == CHAT:
        if not isinstance(call.prompt, str):
            raise ValueError("chat takes text, not token ids: give the programs a TextCodec")
        return {**common, "messages": [{"role": "user", "content": call.prompt}]}
    raise ValueError(f"unknown kind of endpoint {kind!r}; there are {', '.join(PATHS)}")


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
        if event.get("error") is not None:
            error = event["error"]
            self.error = str(error.get("message", error) if isinstance(error, Mapping) else error)
            return
        _FEEDERS[self.kind](self, event)


def _feed_generate(answer: Answer, event: Mapping[str, Any]) -> None:
    meta = event["meta_info"]
    answer.prompt_tokens = meta.get("prompt_tokens", answer.prompt_tokens)
    answer.cached_tokens = meta.get("cached_tokens", answer.cached_tokens)
    answer.output_tokens = int(meta["completion_tokens"])
    ids, text = event.get("output_ids") or [], event.get("text") or ""
    # SGLang streams what it has so far, or, started with another option, only what is new.
    if len(ids) == answer.output_tokens:
        answer.tokens, answer.text = list(ids), text
    else:
        answer.tokens += ids
        answer.text = text if not ids and text.startswith(answer.text) else answer.text + text
    reason = meta.get("finish_reason")
    if reason is not None:
        answer.finished = True
        if isinstance(reason, Mapping) and reason.get("type") == "abort":
            answer.error = f"aborted by the server: {reason.get('message', 'no reason given')}"


def _feed_openai(answer: Answer, event: Mapping[str, Any]) -> None:
    for choice in event.get("choices", ()):
        piece, delta = choice.get("text"), choice.get("delta") or {}
        if piece is None:
            piece = delta.get("content")
        answer.text += piece or ""
        if piece or delta.get("reasoning_content") or delta.get("reasoning"):
            answer.output_tokens += 1  # at least one; the usage tells how many
        reason = choice.get("finish_reason")
        if reason is not None:
            answer.finished = True
            if reason == "abort":
                answer.error = "aborted by the server"
    usage = event.get("usage")
    if usage:
        answer.prompt_tokens = usage.get("prompt_tokens", answer.prompt_tokens)
        answer.output_tokens = usage.get("completion_tokens") or answer.output_tokens
        details = usage.get("prompt_tokens_details")
        if details:
            answer.cached_tokens = details.get("cached_tokens", answer.cached_tokens)


_FEEDERS: Mapping[str, Callable[[Answer, Mapping[str, Any]], None]] = {
    GENERATE: _feed_generate,
    COMPLETIONS: _feed_openai,
    CHAT: _feed_openai,
}
