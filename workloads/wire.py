"""Requests and answers of the HTTP interfaces, as pure functions of JSON.

`generate` is SGLang's own (token ids both ways, exact counts in every event); `completions`, `chat` and `responses` are
OpenAI's and `messages` Anthropic's, where counts come in the usage and ids do not come at all. Those two newer ones
have no field that asks for answers of full length. `embeddings` have one answer, and no output tokens.
"""

import struct
from collections.abc import Callable, Mapping, Sequence
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
    if kind in OF_CHATS and not isinstance(call.prompt, str):
        raise ValueError(f"{kind} takes text, not token ids: give the programs a TextCodec")
    prompt_of_text = call.prompt if isinstance(call.prompt, str) else _ids(call.prompt)
    turns = [{"role": "user", "content": call.prompt}]
    named: dict[str, Any] = {} if user is None else {"user": user}
    if kind == EMBEDDINGS:
        return {"model": model, "input": prompt_of_text, **named}
    sampled = {"model": model, "temperature": temperature, "stream": True}
    if kind == RESPONSES:
        return {**sampled, "input": turns, "max_output_tokens": call.max_output_tokens, **named}
    if kind == MESSAGES:
        named = {} if user is None else {"metadata": {"user_id": user}}
        return {**sampled, "messages": turns, "max_tokens": call.max_output_tokens, **named}
    common = {
        "model": model,
        "max_tokens": call.max_output_tokens,
        "temperature": temperature,
        "stream": True,
        "stream_options": _USAGE,
        **({"ignore_eos": True} if ignore_eos else {}),
        **named,
    }
    if kind == COMPLETIONS:
        return {**common, "prompt": prompt_of_text}
    if kind == CHAT:
        return {**common, "messages": turns}
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


def _feed_responses(answer: Answer, event: Mapping[str, Any]) -> None:
    match event["type"]:
        case "error":
            answer.error = str(event.get("message"))
        case "response.output_text.delta" | "response.reasoning_text.delta":
            answer.text += event["delta"]
            answer.output_tokens += 1  # at least one; the usage tells how many
        case "response.completed" | "response.incomplete" | "response.failed" as ending:
            answer.finished = True
            if ending == "response.failed":
                answer.error = str((event["response"].get("error") or {}).get("message", "failed"))
            _used(answer, event["response"].get("usage"))


def _feed_messages(answer: Answer, event: Mapping[str, Any]) -> None:
    match event["type"]:
        case "message_start":
            _used(answer, event["message"].get("usage"))
        case "content_block_delta":
            answer.text += event["delta"].get("text") or ""
            answer.output_tokens += 1
        case "message_delta":
            answer.output_tokens = event["usage"].get("output_tokens") or answer.output_tokens
        case "message_stop":
            answer.finished = True


def _used(answer: Answer, usage: Mapping[str, Any] | None) -> None:
    """Both APIs' usage. Anthropic's input leaves out what was cached, which is told beside it."""
    if not usage:
        return
    details = usage.get("input_tokens_details")
    cached = details.get("cached_tokens") if details else usage.get("cache_read_input_tokens", 0)
    answer.cached_tokens = cached
    answer.prompt_tokens = usage["input_tokens"] + (0 if details else cached)
    answer.output_tokens = usage.get("output_tokens") or answer.output_tokens


def _feed_embeddings(answer: Answer, event: Mapping[str, Any]) -> None:
    answer.finished = bool(event["data"])
    answer.prompt_tokens = event["usage"]["prompt_tokens"]


_FEEDERS: Mapping[str, Callable[[Answer, Mapping[str, Any]], None]] = {
    GENERATE: _feed_generate,
    COMPLETIONS: _feed_openai,
    CHAT: _feed_openai,
    RESPONSES: _feed_responses,
    MESSAGES: _feed_messages,
    EMBEDDINGS: _feed_embeddings,
}
