"""The longest answer that a caller may have, in a request's body.

A request that names a longer one is refused. One that names none gets SGLang's default, or this one if that is
shorter, in so many words: what is held for it (`access.quota`) is read from the body. SGLang 0.5.23 has 16 for
completions, 128 for /generate, and the rest of the context for chats, where 0 counts as left out; there
`max_completion_tokens` wins over `max_tokens`. Responses have the rest of the context, and messages must name one.
"""

from typing import Any

from router.gateway.errors import ApiError
from router.gateway.request.kinds import Kind

COMPLETION_DEFAULT, GENERATE_DEFAULT = 16, 128


def capped(kind: Kind, body: dict[str, Any], most: int) -> dict[str, Any]:
    """`body` with answers of at most `most` tokens each. What has another type is left to the checks of types.

    Raises `ApiError` 400 if it asks for more.
    """
    match kind:
        case "chat":
            names = ("max_completion_tokens", "max_tokens")
            for name in names:
                _check(body.get(name), most, name)
            named = next((body[name] for name in names if body.get(name)), None)
            return body if named is not None else body | {"max_completion_tokens": most}
        case "completions":
            _check(body.get("max_tokens"), most, "max_tokens")
            named = body.get("max_tokens")
            return body if named is not None else body | {"max_tokens": min(most, COMPLETION_DEFAULT)}
        case "generate":
            given = body.get("sampling_params")
            if given is None:
                given = {}
            if isinstance(given, list):
                return body | {"sampling_params": [_sampling(one, most) for one in given]}
            return body | {"sampling_params": _sampling(given, most)}
        case "messages":
            _check(body.get("max_tokens"), most, "max_tokens")
            return body
        case "responses":
            _check(body.get("max_output_tokens"), most, "max_output_tokens")
            named = body.get("max_output_tokens")
            return body if named is not None else body | {"max_output_tokens": most}
        case _:
            return body  # no answer of tokens


def _sampling(given: Any, most: int) -> Any:
    if not isinstance(given, dict):
        return given
    name = "max_new_tokens"
    _check(given.get(name), most, name)
    if name not in given:
        return given | {name: min(most, GENERATE_DEFAULT)}
    return given if given[name] is not None else given | {name: most}


def _check(named: Any, most: int, name: str) -> None:
    if isinstance(named, int) and named > most:
        raise ApiError(400, f"`{name}` is {named}; you may have {most}", code="output_too_long", param=name)
