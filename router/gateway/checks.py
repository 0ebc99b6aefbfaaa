"""Holds what a client sent against a type, and says what is wrong in this API's words.

A field's `Meta(extra=...)` may say how the sentence about it ends: `must` what it must be, `missing` what is wrong
where it is left out, `code` the error's code.
"""

import re
from functools import cache
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec

from router.gateway.errors import ApiError

AnyType = TypeVar("AnyType", bound=msgspec.Struct)

_MISSING = re.compile(r"missing required field `(\w+)`")
_FIELD = re.compile(r"\.(\w+)[^.]*`$")
_WRONG_TYPE = re.compile(r"Expected `(\w+)[^`]*`, got `(\w+)`")


def check(value: Any, kind: type[AnyType], *, strict: bool = True) -> AnyType:
    """The fields of `value` that `kind` has; without `strict` from texts, as a query has them. Raises `ApiError` 400,
    which names the first that is wrong."""
    try:
        return msgspec.convert(value, kind, strict=strict)
    except msgspec.ValidationError as error:
        raise _refusal(str(error), kind) from error


@cache
def _rules(kind: type[msgspec.Struct]) -> dict[str, dict[str, Any]]:
    """By field, those of types within it too."""
    found: dict[str, dict[str, Any]] = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        for inner in _structs(hint):
            found = _rules(inner) | found
        for meta in getattr(hint, "__metadata__", ()):
            found |= {name: meta.extra} if meta.extra else {}
    return found


def _structs(hint: Any) -> list[type[msgspec.Struct]]:
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return [hint]
    return [one for part in get_args(hint) for one in _structs(part)]


def _refusal(error: str, kind: type[msgspec.Struct]) -> ApiError:
    """msgspec's error in our words."""
    missing, field = _MISSING.search(error), _FIELD.search(error)
    found = missing or field
    if found is None:
        return ApiError(400, error)
    name = found[1]
    rule = _rules(kind).get(name, {})
    types = _WRONG_TYPE.search(error)
    if missing and "missing" in rule:
        problem = rule["missing"]
    elif "must" in rule:
        problem = f"must {rule['must']}"
    elif types is not None:
        problem = f"must be of type {types[1]}, not {types[2]}"
    else:
        problem = error
    return ApiError(400, f"`{name}` {problem}", code=rule.get("code"), param=name)
