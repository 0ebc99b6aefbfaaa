"""Whether another replica could continue a stream: decided from the request alone.

A stream can be continued only if its next token follows from the tokens before it: with greedy decoding. A seed is not
enough. An engine that is not deterministic answers two equal requests with the same seed differently, and whether
an engine is deterministic cannot be seen here. Besides, the request must be stateless, and have one answer, of text
alone.

    tokens   the output tokens that were sent join the prompt; nothing is decoded twice
    repeat   the request is served again from its beginning, and what the client already has is compared and left out

`tokens` loses what the sampler remembers of its output, because that output has become prompt: penalties and grammars
look back on it. So any option that is not known to be harmless means `repeat`. A chat is always repeated, because
SGLang does not stream its token ids.
"""

from collections.abc import Mapping
from typing import Any, Literal

from router.gateway.request.schema import Kind

Way = Literal["tokens", "repeat"]

OUTPUT_LIMIT: Mapping[Kind, str] = {"completions": "max_tokens", "generate": "max_new_tokens"}
OUTPUT_FLOOR: Mapping[Kind, str] = {"completions": "min_tokens", "generate": "min_new_tokens"}

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

_NEUTRAL: Mapping[str, float] = {"frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1}
"""Values with which these options change nothing."""

_MORE_THAN_TEXT = ("logprobs", "top_logprobs", "session_params", "session_id", "beam_width")
"""With any of these, or any `return_…`, an answer is more than its text, or a request depends on another."""


def continuation(kind: Kind, body: Mapping[str, Any]) -> Way | None:
    """How another replica could continue the stream that answers `body`; None if it could not."""
    sampling = body.get("sampling_params") or {} if kind == "generate" else body
    if body.get("stream") is not True or not isinstance(sampling, Mapping):
        return None
    both = {**body, **sampling}
    is_single = all(both.get(name) in (None, 1) for name in ("n", "best_of"))
    if not (is_single and _is_greedy(both)) or _has_more_than_text(both):
        return None
    if kind == "chat" or type(sampling.get(OUTPUT_LIMIT[kind])) is not int:
        return "repeat"
    if type(sampling.get(OUTPUT_FLOOR[kind])) not in (int, type(None)):
        return "repeat"
    known = _MEMORYLESS | _NOT_SAMPLING | {OUTPUT_LIMIT[kind], OUTPUT_FLOOR[kind]}
    others = {name: value for name, value in _given(both).items() if name not in known}
    is_neutral = all(value == _NEUTRAL.get(name) for name, value in others.items())
    return "tokens" if is_neutral else "repeat"


def stop_reach(sampling: Mapping[str, Any]) -> int:
    """How many of the last characters sent may be the beginning of a stop text."""
    stops = sampling.get("stop") or []
    texts = [stops] if isinstance(stops, str) else stops
    return max((len(text) - 1 for text in texts if isinstance(text, str)), default=0)


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
