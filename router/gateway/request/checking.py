"""Holds a body against its type, and says what is wrong with it in this API's words."""

import re
from functools import cache
from typing import Any, TypeVar, get_type_hints

import msgspec

from router.gateway.errors import ApiError
from router.gateway.request.schema import (
    MAX_BATCH,
    Common,
    GenerateRequest,
    Prompt,
    SamplingParams,
    Texts,
    TokenIdLists,
    TokenIds,
)

AnyRequest = TypeVar("AnyRequest", bound=Common)


def check(body: dict[str, Any], request: type[AnyRequest]) -> AnyRequest:
    """The fields of `body` that the gateway reads. Raises `ApiError`, which names the first that is wrong."""
    try:
        return msgspec.convert(body, request)
    except msgspec.ValidationError as error:
        raise _refusal(str(error), request) from error


def check_prompts(value: Any, name: str) -> tuple[tuple[Prompt, ...], bool]:
    """The prompts in the field `name`, and whether they are a list of several. Raises `ApiError`."""
    if isinstance(value, str):
        return (value,), False
    if not isinstance(value, list) or not value:
        raise _invalid(f"`{name}` must be a text, a list of texts, or token ids")
    first = value[0]
    if isinstance(first, str | list) and len(value) > MAX_BATCH:
        raise ApiError(
            400, f"`{name}` holds {len(value)} prompts; at most {MAX_BATCH}", code="batch_too_large"
        )
    try:
        if isinstance(first, str):
            return tuple(msgspec.convert(value, Texts)), True
        if isinstance(first, list):
            return tuple(msgspec.convert(value, TokenIdLists)), True
        return (msgspec.convert(value, TokenIds),), False
    except msgspec.ValidationError as error:
        if isinstance(first, str):
            raise _invalid(f"`{name}` mixes texts with something else") from error
        if "length" in str(error):
            raise _invalid(f"`{name}` must hold a non-empty list of token ids") from error
        raise _invalid(f"`{name}` holds something that is no token id") from error


def _invalid(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_prompt")


_MISSING = re.compile(r"missing required field `(\w+)`")
_FIELD = re.compile(r"\.(\w+)[^.]*`$")
_WRONG_TYPE = re.compile(r"Expected `(\w+)[^`]*`, got `(\w+)`")


@cache
def _rules(request: type[Common]) -> dict[str, dict[str, Any]]:
    """By field: how an error says what it must be, which is the `extra` of its type."""
    nested = (SamplingParams,) if request is GenerateRequest else ()
    return {
        name: meta.extra
        for one in (*nested, request)
        for name, hint in get_type_hints(one, include_extras=True).items()
        for meta in getattr(hint, "__metadata__", ())
        if meta.extra
    }


def _refusal(error: str, request: type[Common]) -> ApiError:
    """msgspec's error in this API's words."""
    missing, field = _MISSING.search(error), _FIELD.search(error)
    found = missing or field
    if found is None:
        return ApiError(400, error)
    name = found[1]
    rule = _rules(request).get(name, {})
    types = _WRONG_TYPE.search(error)
    if missing and "missing" in rule:
        problem = rule["missing"]
    elif "must" in rule:
        problem = f"must {rule['must']}"
    elif types is not None:
        problem = f"must be of type {types[1]}, not {types[2]}"
    else:
        problem = error
    return ApiError(400, f"`{name}` {problem}", code=rule.get("code"))
