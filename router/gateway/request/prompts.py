"""The prompts in a body, which no type of msgspec can say: two kinds of arrays in one field."""

from typing import Any

import msgspec

from router.gateway.errors import ApiError
from router.gateway.request.schema import Prompt, Texts, TokenIdLists, TokenIds
from sglang_fair.common.fields import MAX_BATCH


def check_prompts(value: Any, name: str) -> tuple[tuple[Prompt, ...], bool]:
    """The prompts in the field `name`, and whether they are a list of several. Raises `ApiError`."""
    if isinstance(value, str):
        return (value,), False
    if not isinstance(value, list) or not value:
        raise _invalid(f"`{name}` must be a text, a list of texts, or token ids", name)
    first = value[0]
    if isinstance(first, str | list) and len(value) > MAX_BATCH:
        raise ApiError(
            400,
            f"`{name}` holds {len(value)} prompts; at most {MAX_BATCH}",
            code="batch_too_large",
            param=name,
        )
    try:
        if isinstance(first, str):
            return tuple(msgspec.convert(value, Texts)), True
        if isinstance(first, list):
            return tuple(msgspec.convert(value, TokenIdLists)), True
        return (msgspec.convert(value, TokenIds),), False
    except msgspec.ValidationError as error:
        if isinstance(first, str):
            raise _invalid(f"`{name}` mixes texts with something else", name) from error
        if "length" in str(error):
            raise _invalid(f"`{name}` must hold a non-empty list of token ids", name) from error
        raise _invalid(f"`{name}` holds something that is no token id", name) from error


def _invalid(message: str, name: str) -> ApiError:
    return ApiError(400, message, code="invalid_prompt", param=name)
