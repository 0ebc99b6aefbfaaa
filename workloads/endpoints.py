"""Endpoints that somebody else started: how they identify a client, whether they answer, and what they serve."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from sglang_fair.common.identity import API_KEY, HEADER_CLIENT, USER

IDENTITIES: Mapping[str, str] = {
    "fair": HEADER_CLIENT,
    "tenant": "x-tenant-id",
    "smg": "x-smg-tenant-id",
    "llm-d": "x-llm-d-inference-fairness-id",
    "gateway-api": "x-gateway-inference-fairness-id",
    API_KEY: "",
    USER: "",
    "none": "",
}
"""Where a client's name goes, by the server that reads it there: ours (with application, interaction and stage), any
that takes a tenant, sglang-router (SMG), llm-d's router, the Gateway API's; a key for each client; OpenAI's field
`user`; nowhere."""

HEADER = "header:"
"""Prefix of any other header's name."""


class EndpointError(RuntimeError):
    """An endpoint does not answer, or does not serve what was asked for. The text is one line."""


def identity(place: str, names: Sequence[str], keys: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The fields of an `Endpoint` that identify these clients at `place`. Raises ValueError.

    With API keys, a client without one of its own sends its name as the key; that is enough where keys are not
    checked.
    """
    if place.startswith(HEADER) and place != HEADER:
        return {"named_in": place.removeprefix(HEADER)}
    if place not in IDENTITIES:
        known = ", ".join(IDENTITIES)
        raise ValueError(f"unknown identity {place!r}; there are {known}, and {HEADER}NAME")
    if keys and place != API_KEY:
        raise ValueError(f"keys of clients belong to the identity {API_KEY}, not to {place}")
    if place != API_KEY:
        return {"named_in": IDENTITIES[place], "user_field": place == USER}
    given = keys or {}
    if unknown := sorted(given.keys() - set(names)):
        raise ValueError(f"keys of clients that there are not: {', '.join(unknown)}")
    return {"named_in": IDENTITIES[place], "api_keys": {name: given.get(name, name) for name in names}}


def read_keys(path: Path) -> dict[str, str]:
    """Keys by client, a JSON object of strings. Raises ValueError and OSError."""
    try:
        keys = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(keys, dict) or not all(isinstance(key, str) and key for key in keys.values()):
        raise ValueError(f"{path}: must be a JSON object that maps clients to keys")
    return keys


async def find_model(
    url: str, wanted: str | None, api_key: str | None = None, *, timeout_s: float = 10.0
) -> str | None:
    """The model to ask for: `wanted`, or the endpoint's only one. None if it does not list its models and none
    is wanted.

    Raises EndpointError where nobody answers, the key is refused, the model is not among those listed, or
    there are several to choose from.
    """
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as session,
            session.get(f"{url.rstrip('/')}/v1/models", headers=headers) as response,
        ):
            status, text = response.status, await response.text()
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
        said = str(error) or f"no answer within {timeout_s:g} s"
        raise EndpointError(f"there is no endpoint at {url}: {said}") from error
    if status in (401, 403):
        raise EndpointError(f"{url} refuses the key (HTTP {status})")
    if status != 200:
        return wanted
    models = _listed(text)
    if wanted is not None and models and wanted not in models:
        raise EndpointError(f"{url} has no model {wanted!r}; there are {', '.join(models)}")
    if wanted is None and len(models) > 1:
        raise EndpointError(f"{url} has several models, name one: {', '.join(models)}")
    return wanted or (models[0] if models else None)


def _listed(text: str) -> list[str]:
    """The ids of OpenAI's list of models; none where it is something else."""
    try:
        return [str(model["id"]) for model in json.loads(text)["data"]]
    except (ValueError, KeyError, TypeError):
        return []
