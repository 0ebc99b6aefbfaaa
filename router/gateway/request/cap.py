"""The longest answer that a caller may have, in a request's body.

A request that names a longer one is refused. One that names none gets SGLang's default, or this one if that is
shorter, in so many words: what is held for it (`access.quota`) is read from the body. SGLang 0.5.23 has 16 for
completions, 128 for /generate, and the rest of the context for chats, where 0 counts as left out; there
`max_completion_tokens` wins over `max_tokens`. Responses have the rest of the context, and messages must name one.
"""

from collections.abc import Mapping
from typing import Any

from router.gateway.errors import ApiError
from router.gateway.request.kinds import Kind

FIELDS: Mapping[Kind, tuple[str, ...]] = {
    "chat": ("max_completion_tokens", "max_tokens"),
    "completions": ("max_tokens",),
    "generate": ("max_new_tokens",),
    "messages": ("max_tokens",),
    "responses": ("max_output_tokens",),
}
DEFAULTS: Mapping[Kind, int] = {"completions": 16, "generate": 128}


def capped(kind: Kind, body: dict[str, Any], most: int) -> dict[str, Any]:
    """`body` with answers of at most `most` tokens each. What has another type is left to the checks of types.

    Raises `ApiError` 400 if it asks for more.
    """
    if kind not in FIELDS:
        return body
    if kind != "generate":
        made: dict[str, Any] = _capped(kind, body, most)
        return made
    given = body.get("sampling_params")
    if isinstance(given, list):
        return body | {"sampling_params": [_capped(kind, one, most) for one in given]}
    return body | {"sampling_params": _capped(kind, {} if given is None else given, most)}


def _capped(kind: Kind, holder: Any, most: int) -> Any:
    if not isinstance(holder, dict):
        return holder
    for name in FIELDS[kind]:
        named = holder.get(name)
        if isinstance(named, int) and named > most:
            text = f"`{name}` is {named}; you may have {most}"
            raise ApiError(400, text, code="output_too_long", param=name)
    match kind:
        case "messages":
            return holder
        case "chat":
            is_named = any(holder.get(name) for name in FIELDS[kind])
        case _:
            is_named = holder.get(FIELDS[kind][0]) is not None
    if is_named:
        return holder
    # SGLang takes a null of /generate for the rest of the context.
    default = most if kind == "generate" and FIELDS[kind][0] in holder else DEFAULTS.get(kind, most)
    return holder | {FIELDS[kind][0]: min(most, default)}
