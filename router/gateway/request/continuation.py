"""Whether another replica can continue the stream that answers a request, and how, once its own replica has died.

A stream can be continued if its next token depends on the tokens before it and on nothing else that died with the
replica. So the request must be stateless, and have one answer, of text alone.

    tokens   greedy: the output tokens that were sent join the prompt; nothing is decoded twice
    repeat   greedy: the request is served again from its beginning, and what the client already has is compared and
             left out
    sample   the same as `tokens`, for a stream that is sampled. The next token has the same distribution wherever it
             is drawn, so the whole is a true sample. Other words than the lost replica's may follow: a seed decides
             only where the engine is deterministic, and that cannot be seen here. Nothing can be repeated and compared

`tokens` and `sample` lose what the sampler remembers of its output, because that output has become prompt. Of the
sampling options of SGLang 0.5.23:

    temperature, top_p, top_k, min_p, logit_bias     remember nothing
    seed, sampling_seed      the position in the whole sequence is drawn with, which stays the same
    max_tokens, min_tokens   count output: what was sent is subtracted
    stop, stop_token_ids     look back on the output. A replica sends no token while its text may be the beginning of a
                             stop text, so none lies across the border
    frequency_penalty        counts output tokens. Each lowers its token's logit by so much: a `logit_bias` for what was
                             sent does the same
    presence_penalty, repetition_penalty    look back, and count a token once: with them nothing goes on by its tokens
    json_schema, regex, ebnf, response_format, tools    a grammar or a parser is in the middle: the same
    anything that is not known here         the same

With these, greedy decoding is repeated, and a sampled stream ends. A greedy chat is always repeated, because SGLang
does not stream its token ids; for a sampled one the gateway asks the overlay for them (`common.token_ids`).

The streams of /v1/responses and /v1/messages are not continued: they number their events and items, and a second
replica would begin anew. They end in their API's own error event.
"""

from collections.abc import Mapping
from typing import Any, Literal

from router.gateway.request.kinds import Kind

Way = Literal["tokens", "repeat", "sample"]

OUTPUT_LIMIT: Mapping[Kind, str] = {"completions": "max_tokens", "generate": "max_new_tokens"}
OUTPUT_FLOOR: Mapping[Kind, str] = {
    "chat": "min_tokens", "completions": "min_tokens", "generate": "min_new_tokens",
}  # fmt: skip

OUTPUT_LIMITS: Mapping[Kind, tuple[str, ...]] = {
    "chat": ("max_tokens", "max_completion_tokens"),
    "completions": ("max_tokens",),
    "generate": ("max_new_tokens",),
}
"""All names of the limit. A chat may have none: then the model's context is its limit."""

FREQUENCY = "frequency_penalty"

_MEMORYLESS = {
    "temperature", "top_p", "top_k", "min_p", "seed", "sampling_seed", "logit_bias", "n", "best_of",
    "stop", "stop_token_ids", "no_stop_trim", "ignore_eos", "skip_special_tokens",
    "spaces_between_special_tokens", "custom_params",
}  # fmt: skip
"""Sampling options that mean the same in the middle of an answer as at its beginning."""

_NOT_SAMPLING = {
    "model", "prompt", "text", "input_ids", "sampling_params", "stream", "stream_options", "user", "rid",
    "lora_path", "extra_key", "cache_salt", "priority",
}  # fmt: skip

_CHAT = {"messages", "chat_template_kwargs"}

_Never = object()
"""Equal to no value of a request."""

_NEUTRAL: Mapping[str, float] = {"frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1}
"""Values with which these options change nothing."""

_MORE_THAN_TEXT = ("logprobs", "top_logprobs", "session_params", "session_id", "beam_width")
"""With any of these, or any `return_…`, an answer is more than its text, or a request depends on another."""


def continuation(kind: Kind, body: Mapping[str, Any]) -> Way | None:
    """How another replica could continue the stream that answers `body`; None if it could not."""
    if kind not in OUTPUT_LIMITS:
        return None
    sampling = body.get("sampling_params") or {} if kind == "generate" else body
    if body.get("stream") is not True or not isinstance(sampling, Mapping):
        return None
    both = {**body, **sampling}
    is_single = all(both.get(name) in (None, 1) for name in ("n", "best_of"))
    if not is_single or _has_more_than_text(both):
        return None
    if not _is_greedy(both):
        return "sample" if _goes_on_by_tokens(kind, sampling, both) else None
    if kind == "chat" or type(sampling.get(OUTPUT_LIMIT[kind])) is not int:
        return "repeat"
    if type(sampling.get(OUTPUT_FLOOR[kind])) not in (int, type(None)):
        return "repeat"
    known = _MEMORYLESS | _NOT_SAMPLING | {OUTPUT_LIMIT[kind], OUTPUT_FLOOR[kind]}
    others = {name: value for name, value in _given(both).items() if name not in known}
    is_neutral = all(value == _NEUTRAL.get(name) for name, value in others.items())
    return "tokens" if is_neutral else "repeat"


def _goes_on_by_tokens(kind: Kind, sampling: Mapping[str, Any], both: Mapping[str, Any]) -> bool:
    """Whether nothing but the tokens so far says how this sampled stream goes on."""
    limits = [sampling.get(name) for name in OUTPUT_LIMITS[kind]]
    if any(type(limit) not in (int, type(None)) for limit in limits):
        return False
    if kind != "chat" and limits == [None]:
        return False
    if type(sampling.get(OUTPUT_FLOOR[kind])) not in (int, type(None)):
        return False
    if type(both.get(FREQUENCY)) not in (int, float, type(None)):
        return False
    bias = both.get("logit_bias") or {}
    if not isinstance(bias, Mapping):
        return False
    if sampling.get(FREQUENCY) and not all(type(value) in (int, float) for value in bias.values()):
        return False  # it is added to
    known = {*_MEMORYLESS, *_NOT_SAMPLING, *OUTPUT_LIMITS[kind], OUTPUT_FLOOR[kind], FREQUENCY}
    if kind == "chat":
        if not all(_is_text(message) for message in both["messages"]):
            return False
        known |= _CHAT
    return all(name in known or value == _NEUTRAL.get(name, _Never) for name, value in _given(both).items())


def _is_text(message: Any) -> bool:
    """Whether a message of a chat is text alone."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if isinstance(content, list):
        return all(isinstance(part, Mapping) and part.get("type") == "text" for part in content)
    return isinstance(content, str | None)


def stop_reach(sampling: Mapping[str, Any]) -> int:
    """How many of the last characters sent may be the beginning of a stop text."""
    stops = sampling.get("stop") or []
    texts = [stops] if isinstance(stops, str) else stops
    return max((len(text) - 1 for text in texts if isinstance(text, str)), default=0)


def begins_stop(sampling: Mapping[str, Any], text: str) -> bool:
    """Whether `text` ends with the beginning of a stop text."""
    stops = sampling.get("stop") or []
    texts = [stops] if isinstance(stops, str) else stops
    return any(
        text.endswith(stop[:length])
        for stop in texts
        if isinstance(stop, str)
        for length in range(1, len(stop))
    )


def _is_greedy(both: Mapping[str, Any]) -> bool:
    return both.get("temperature") == 0 or both.get("top_k") == 1


def _has_more_than_text(both: Mapping[str, Any]) -> bool:
    options = both.get("stream_options")
    if isinstance(options, Mapping) and options.get("continuous_usage_stats"):
        return True
    return any(name in _MORE_THAN_TEXT or name.startswith("return_") for name in _given(both))


def _given(both: Mapping[str, Any]) -> dict[str, Any]:
    """The options with a value; null and false count as left out."""
    return {name: value for name, value in both.items() if value is not None and value is not False}
