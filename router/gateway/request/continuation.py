"""Whether another replica can go on with a stream: read from the request alone.

A stream can go on when its next token follows from what was sent: greedy decoding, or a seed (SGLang draws
from seed and position). It must be one answer, of text alone, from a stateless request.

    tokens   the output ids that were sent join the prompt; nothing is computed twice but their KV
    repeat   the request is served again from its beginning, and what the client has is compared and left out

By tokens goes only what forgets nothing by it: penalties and grammars look back on the output, which would
have become prompt. Every option that is not listed below is therefore repeated. A chat is repeated always,
for SGLang does not stream the ids of its tokens.
"""

from collections.abc import Mapping
from typing import Any, Literal

Kind = Literal["chat", "completions", "generate"]
Way = Literal["tokens", "repeat"]

OUTPUT_LIMIT: Mapping[Kind, str] = {"completions": "max_tokens", "generate": "max_new_tokens"}
OUTPUT_FLOOR: Mapping[Kind, str] = {"completions": "min_tokens", "generate": "min_new_tokens"}

_FREE = {
    "temperature", "top_p", "top_k", "min_p", "seed", "sampling_seed", "logit_bias", "n", "best_of",
    "stop", "stop_token_ids", "no_stop_trim", "ignore_eos", "skip_special_tokens",
    "spaces_between_special_tokens", "custom_params",
}  # fmt: skip
"""Options of sampling that mean the same in the middle of an answer as at its beginning."""

_ABOUT = {
    "model", "prompt", "text", "input_ids", "sampling_params", "stream", "stream_options", "user", "rid",
    "lora_path", "extra_key", "cache_salt", "priority",
}  # fmt: skip
"""Options that say nothing of sampling."""

_NEUTRAL: Mapping[str, float] = {"frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1}

_MORE_THAN_TEXT = ("logprobs", "top_logprobs", "session_params", "session_id", "beam_width")
"""Besides all `return_…`: what makes an answer more than its text, or a request more than itself."""


def resumption(kind: Kind, body: Mapping[str, Any]) -> Way | None:
    """How a stream that answers `body` could go on elsewhere; None if it could not, or is none."""
    sampling = body.get("sampling_params") or {} if kind == "generate" else body
    if body.get("stream") is not True or not isinstance(sampling, Mapping):
        return None
    both = {**body, **sampling}
    one_answer = all(both.get(name) in (None, 1) for name in ("n", "best_of"))
    if not (one_answer and _follows(both)) or _has_more_than_text(both):
        return None
    if kind == "chat" or type(sampling.get(OUTPUT_LIMIT[kind])) is not int:
        return "repeat"
    if type(sampling.get(OUTPUT_FLOOR[kind])) not in (int, type(None)):
        return "repeat"
    known = _FREE | _ABOUT | {OUTPUT_LIMIT[kind], OUTPUT_FLOOR[kind]}
    rest = {name: value for name, value in _given(both).items() if name not in known}
    return "tokens" if all(rest[name] == _NEUTRAL.get(name) for name in rest) else "repeat"


def stop_reach(sampling: Mapping[str, Any]) -> int:
    """Characters before the end of what was sent in which a stop text may have begun."""
    stops = sampling.get("stop") or []
    texts = [stops] if isinstance(stops, str) else stops
    return max((len(text) - 1 for text in texts if isinstance(text, str)), default=0)


def _follows(both: Mapping[str, Any]) -> bool:
    """Whether each token follows from those before it."""
    is_seeded = any(type(both.get(name)) is int for name in ("seed", "sampling_seed"))
    return is_seeded or both.get("temperature") == 0 or both.get("top_k") == 1


def _has_more_than_text(both: Mapping[str, Any]) -> bool:
    options = both.get("stream_options")
    if isinstance(options, Mapping) and options.get("continuous_usage_stats"):
        return True
    return any(name in _MORE_THAN_TEXT or name.startswith("return_") for name in _given(both))


def _given(both: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in both.items() if value is not None and value is not False}
