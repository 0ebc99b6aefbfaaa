"""What a tenants' file may say.

    tenants:
      gold:
        keys: ["sha256:2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae"]
        weight: 3
        models: [llama, "llama:support"]
        cache_group: team-a
        limits: {requests_per_minute: 600, tokens_per_minute: 200000, concurrency: 32}
        apps: [chat, agent]
        overload: {calls_per_minute: 60, apps: {chat: 30}}

Limits are a group of their own: the same group can stand below an application or a class of requests later.
"""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from sglang_fair.common.identity import ANONYMOUS, MAX_NAME_CHARS
from sglang_fair.tenants import keys

NAME_PATTERN = rf"^[A-Za-z0-9][A-Za-z0-9._:@/-]{{0,{MAX_NAME_CHARS - 1}}}$"
"""Such a name is the same in headers, logs and tables (`common.identity.bounded` leaves it as it is)."""

MOST = 1 << 53
"""Largest count: JSON and Redis carry it exactly."""


def _not_anonymous(name: str) -> str:
    if name == ANONYMOUS:
        raise ValueError(f"{ANONYMOUS!r} is the client of requests without a name")
    return name


Name = Annotated[str, Field(pattern=NAME_PATTERN), AfterValidator(_not_anonymous)]
Digest = Annotated[str, Field(pattern=keys.DIGEST_PATTERN)]
Count = Annotated[int, Field(ge=1, le=MOST)]


class Part(BaseModel):
    """What all parts of the file have in common: no field that is not there, no text for a number."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Limits(Part):
    """What one tenant may use. A limit that is left out does not exist."""

    requests_per_minute: Count | None = Field(default=None, description="Requests in a minute of the clock.")
    tokens_per_minute: Count | None = Field(
        default=None,
        description="Tokens of prompts, cached or not, and of answers, in a minute of the clock.",
    )
    tokens_per_day: Count | None = Field(
        default=None, description="The same in a day, which begins at 00:00 UTC."
    )
    concurrency: Count | None = Field(
        default=None,
        description="Requests at a time: of all gateways with `--limit-store`, else in each of their processes.",
    )
    prompt_tokens: Count | None = Field(
        default=None, description="Longest prompt; all prompts of one request together."
    )
    output_tokens: Count | None = Field(
        default=None, description="Longest answer. A request that names no limit gets this one."
    )


class Overload(Part):
    """What one tenant may ask while the cluster is overloaded, where the router throttles (`--throttle oit`). Calls of
    interactions that have begun are never refused. What is left out is as for everybody (`--limits`)."""

    calls_per_minute: Count | None = Field(default=None, description="First calls in any 60 seconds.")
    apps: dict[str, Count] = Field(
        default={}, description='The same by application; "*" stands for each one that is not named.'
    )

    def of_app(self, app: str) -> int | None:
        """Calls a minute of `app`; None: nothing is said of it."""
        return self.apps.get(app, self.apps.get("*"))


class Tenant(Part):
    """Somebody who may ask."""

    keys: list[Digest] = Field(
        default=[], max_length=64, description="Digests of its keys. Without one nobody can ask in its name."
    )
    weight: Annotated[float, Field(ge=1e-6, le=1e6)] = Field(
        default=1.0, description="Its share beside the others'."
    )
    models: list[Annotated[str, Field(min_length=1, max_length=256)]] | None = Field(
        default=None,
        description="What it may ask for: names of models, and MODEL:ADAPTER for an adapter. Left out: everything.",
    )
    cache_group: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:@/-]{1,128}$")] | None = Field(
        default=None,
        description="Tenants of one group share cached prefixes, those of different groups none.",
    )
    limits: Limits = Limits()
    overload: Overload = Overload()
    apps: list[Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]] | None = Field(
        default=None,
        description="Applications that it may name; any other one counts as (other). Left out: any.",
    )


class Tenants(Part):
    """A tenants' file."""

    tenants: dict[Name, Tenant] = Field(description="By name, which is the client's name everywhere.")

    @model_validator(mode="after")
    def _keys_are_different(self) -> "Tenants":
        owners: dict[str, str] = {}
        for name, tenant in self.tenants.items():
            for index, one in enumerate(tenant.keys):
                if one in owners:
                    place: list[str | int] = ["tenants", name, "keys", index]
                    raise PydanticCustomError(
                        "same_key", "tenant {owner} has this key too", {"owner": owners[one], "place": place}
                    )
                owners[one] = name
        return self


def json_schema() -> dict[str, Any]:
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Tenants.model_json_schema()}
