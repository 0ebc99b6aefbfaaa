"""Whether another replica can continue the stream that answers a request, once its own replica has died.

It can if the next token depends on the tokens before it and on nothing else that died with the replica. Then the output
tokens that were sent join the prompt: a greedy stream goes on in the same words, and in a sampled one the next token
has the same distribution wherever it is drawn, so the whole is a true sample. (A seed decides only where the engine is
deterministic, and that cannot be seen here.) So the request must be stateless, and have one answer, of text alone.

What the sampler remembers of its output is lost, because that output has become prompt. Of the sampling options of
SGLang 0.5.23:

    temperature, top_p, top_k, min_p, logit_bias     remember nothing
    seed, sampling_seed      the position in the whole sequence is drawn with, which stays the same
    max_tokens, min_tokens   count output: what was sent is subtracted
    stop, stop_token_ids     look back on the output. A replica sends no token while its text may be the beginning of a
                             stop text, so none lies across the border
    frequency_penalty        counts output tokens. Each lowers its token's logit by so much: a `logit_bias` for what was
                             sent does the same
    presence_penalty, repetition_penalty    look back, and count a token once: with them no stream goes on
    json_schema, regex, ebnf, response_format, tools    a grammar or a parser is in the middle: the same
    anything that is not known here         the same

The token ids of completions and /generate are SGLang's; those of a chat, which it does not stream, are asked of the
overlay (`common.token_ids`). The streams of /v1/responses and /v1/messages are not continued: they number their events
and items, and a second replica would begin anew. What cannot go on ends in its API's own error event.
"""

from collections.abc import Mapping
from typing import Any

from router.gateway.request.kinds import KINDS, Kind

OUTPUT_FLOOR: Mapping[Kind, str] = {
    "chat": "min_tokens", "completions": "min_tokens", "generate": "min_new_tokens",
}  # fmt: skip

OUTPUT_LIMITS: Mapping[Kind, tuple[str, ...]] = {kind: KINDS[kind].lengths for kind in OUTPUT_FLOOR}
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

_KNOWN: Mapping[Kind, set[str]] = {
    kind: {*_MEMORYLESS, *_NOT_SAMPLING, *limits, OUTPUT_FLOOR[kind], FREQUENCY}
    | ({"messages", "chat_template_kwargs"} if kind == "chat" else set())
    for kind, limits in OUTPUT_LIMITS.items()
}

_Never = object()
"""Equal to no value of a request."""

_NEUTRAL: Mapping[str, float] = {"frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1}
"""Values with which these options change nothing."""

_MORE_THAN_TEXT = ("logprobs", "top_logprobs", "session_params", "session_id", "beam_width")
"""With any of these, or any `return_…`, an answer is more than its text, or a request depends on another."""


def can_go_on(kind: Kind, body: Mapping[str, Any]) -> bool:
    """Whether another replica could continue the stream that answers `body`, whose fields have their types."""
    if kind not in OUTPUT_LIMITS or body.get("stream") is not True:
        return False
    sampling = body.get("sampling_params") or {} if kind == "generate" else body
    if not isinstance(sampling, Mapping):
        return False
    both = {**body, **sampling}
    if any(both.get(name) not in (None, 1) for name in ("n", "best_of")) or _has_more_than_text(both):
        return False
    limits = [sampling.get(name) for name in OUTPUT_LIMITS[kind]]
    if kind != "chat" and limits == [None]:
        return False
    if kind == "chat" and not all(map(_is_text, both["messages"])):
        return False
    known = _KNOWN[kind]
    return all(name in known or value == _NEUTRAL.get(name, _Never) for name, value in _given(both).items())


def _is_text(message: Any) -> bool:
    content = message.get("content") if isinstance(message, Mapping) else None
    if isinstance(content, list):
        return all(isinstance(part, Mapping) and part.get("type") == "text" for part in content)
    return isinstance(content, str | None)


def begins_stop(sampling: Mapping[str, Any], text: str) -> bool:
    stops = sampling.get("stop") or []
    texts = [stops] if isinstance(stops, str) else stops
    return any(
        text.endswith(stop[:length])
        for stop in texts
        if isinstance(stop, str)
        for length in range(1, len(stop))
    )


def _has_more_than_text(both: Mapping[str, Any]) -> bool:
    options = both.get("stream_options")
    if isinstance(options, Mapping) and options.get("continuous_usage_stats"):
        return True
    return any(name in _MORE_THAN_TEXT or name.startswith("return_") for name in _given(both))


def _given(both: Mapping[str, Any]) -> dict[str, Any]:
    """The options with a value; null and false count as left out."""
    return {name: value for name, value in both.items() if value is not None and value is not False}
