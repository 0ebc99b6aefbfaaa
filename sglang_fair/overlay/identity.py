"""Carries the client's name and its announcements from the HTTP request to the scheduler, where they become a job, and
judges what it sent.

They travel in `sampling_params.custom_params`, which survives every endpoint, streaming, batches and n > 1. A `fair`
entry in a client's own body is dropped: only the server says who a client is, and which requests are its own. A
client's weight and cache group, the number of a call in its interaction, the tokens of its system messages, its tier
and by when its first token is due are believed where its name is the gateway's. So are the salt of a request whose body
has no field for it, and the id of one of Anthropic's API, by which it can be cancelled.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import Any

from sglang_fair.common.caller import HEADER_SALT, HEADER_WEIGHT, read_salt, read_weight, salted
from sglang_fair.common.deadlines import (
    HEADER_CLASS,
    HEADER_SLACK,
    HEADER_TIER,
    read_class,
    read_slack,
    read_tier,
    time_to_live,
)
from sglang_fair.common.fields import GENERATE, ROUTES, Direct, Facts, Rule, check, judge
from sglang_fair.common.identity import (
    ANONYMOUS,
    API_KEY,
    HEADER_ATTEMPT,
    HEADER_CALL,
    HEADER_CLIENT,
    HEADER_SYSTEM_TOKENS,
    announced,
    bounded,
    identify,
)
from sglang_fair.common.interaction import Apps, part_of, read_count
from sglang_fair.core.job import Job
from sglang_fair.overlay import application, config
from sglang_fair.overlay.model_gate import is_probe

MESSAGES = "/v1/messages"

CUSTOM_PARAMS_KEY = "fair"
"""Where a request carries its client inside `sampling_params.custom_params`."""


def carry_client(obj: Any, request: Any) -> None:
    """Write the sender into `obj`, SGLang's generate or embedding input. `request` is the HTTP request. Raises
    `BadDeadline`."""
    carried: dict[str, str | float | bool] = {"client": ANONYMOUS}
    believed = False
    if request is not None:
        order, user = _places(request), user_of(request)
        believed = _names_client(request.headers, user, order)
        if believed and (told := read_weight(request.headers.get(HEADER_WEIGHT, ""))) is not None:
            carried["weight"], carried["weight_version"] = told
        carried["client"] = identify(request.headers, user, order)
        carried |= announced(request.headers)
        part = part_of(request.headers, metadata_of(request))
        carried |= {key: value for key, value in part._asdict().items() if value}
        if HEADER_ATTEMPT in request.headers:
            carried["attempt"] = bounded(request.headers[HEADER_ATTEMPT])
        if believed:
            counted = {"call": HEADER_CALL, "system_tokens": HEADER_SYSTEM_TOKENS}
            said = {key: read_count(request.headers.get(header, "")) for key, header in counted.items()}
            carried |= {key: count for key, count in said.items() if count is not None}
        if believed and (slack_s := read_slack(request.headers.get(HEADER_SLACK, ""))) is not None:
            carried["slack_s"] = slack_s
            carried["slo_class"] = read_class(request.headers.get(HEADER_CLASS, ""))
        if believed and (tier := read_tier(request.headers.get(HEADER_TIER, ""))):
            carried["tier"] = tier
        if (ttl_s := time_to_live(request.headers)) is not None:
            carried["ttl_s"] = ttl_s
        if is_health_check(request) or is_probe(request):
            carried["system"] = True
        if believed and (salt := read_salt(request.headers.get(HEADER_SALT, ""))) is not None:
            if hasattr(obj, "cache_salt"):
                obj.cache_salt = salt
            else:
                carried["salt"] = salt
        if believed and "attempt" in carried and request.scope.get("path") == MESSAGES:
            obj.rid = carried["attempt"]
    if not believed:
        _keep_out_of_groups(obj)
    if obj.sampling_params is None:
        obj.sampling_params = {}
    each = obj.sampling_params if isinstance(obj.sampling_params, list) else [obj.sampling_params]
    for parameters in each:
        custom = dict(parameters.get("custom_params") or {})
        custom[CUSTOM_PARAMS_KEY] = carried
        parameters["custom_params"] = custom


def _places(request: Any) -> tuple[str, ...]:
    """Where a client's name is looked for. Where the server asks for a key, all who may ask have the same one, SGLang's
    own warm-up too: it names nobody."""
    order = config.read_identity()
    http = application.server()
    if http is None or "app" not in request.scope or not http.get_serving().api_key:
        return order
    return tuple(place for place in order if place != API_KEY)


def _names_client(headers: Mapping[str, str], user: str | None, order: Sequence[str]) -> bool:
    """Whether the client's name comes from `HEADER_CLIENT`, where the gateway puts it."""
    if HEADER_CLIENT not in order or not headers.get(HEADER_CLIENT, "").strip():
        return False
    before = order[: order.index(HEADER_CLIENT)]
    return not before or identify(headers, user, before) == ANONYMOUS


def _keep_out_of_groups(obj: Any) -> None:
    """Only the gateway says which cache group a request is of: what looks like a group's salt becomes another one."""
    salt = getattr(obj, "cache_salt", None)
    if isinstance(salt, str):
        obj.cache_salt = salted(None, salt)
    elif isinstance(salt, list):
        obj.cache_salt = [salted(None, one) or "" if isinstance(one, str) else one for one in salt]


def is_health_check(request: Any) -> bool:
    """Whether the server itself made what it generates for this HTTP request. Its id is no sign of that: SGLang gives
    health checks ids with a prefix, which any client may give to a request as well."""
    http = application.server()
    return http is not None and request.scope.get("endpoint") is http.health_generate


def user_of(request: Any) -> str | None:
    """OpenAI's field `user`, or Anthropic's `metadata.user_id`."""
    body = _body(request)
    user = body.get("user")
    if request.scope.get("path") == MESSAGES and isinstance(body.get("metadata"), dict):
        user = body["metadata"].get("user_id")
    return user if isinstance(user, str) else None


def metadata_of(request: Any) -> Any:
    """The OpenAI `metadata` field, whatever it is."""
    return _body(request).get("metadata")


def _body(request: Any) -> Mapping[str, Any]:
    """What the server has already parsed."""
    body = getattr(request, "_json", None)
    return body if isinstance(body, dict) else {}


AS_CARRIED = frozenset({
    "system", "expected_output_tokens", "unblocks", "weight", "weight_version", "attempt", "session", "interaction",
    "stage", "call", "slo_class", "tier",
})  # fmt: skip
"""Fields of a job that are taken over."""


def job_of(request: Any, apps: Apps, now_s: float) -> Job:
    """A new request as a job, with what the HTTP side noted about its sender. `apps` says which applications it may
    name. `call` is 0 if no gateway has numbered it."""
    carried = carried_by(request)
    client, prompt_tokens = carried.get("client", ANONYMOUS), len(request.origin_input_ids)
    job = Job(request.rid, client, prompt_tokens, request.sampling_params.max_new_tokens or 0)
    job.request, job.arrived_s, job.call = request, now_s, 0
    job.given_tokens = len(request.output_ids)  # if the books are younger than it is
    for name in carried.keys() & AS_CARRIED:
        setattr(job, name, carried[name])
    job.app = apps.of(client, carried.get("app", ""))
    job.system_tokens = min(carried.get("system_tokens", 0), prompt_tokens)
    if (slack_s := carried.get("slack_s")) is not None:
        job.deadline_s = now_s + slack_s
    if (ttl_s := carried.get("ttl_s")) is not None:
        job.expires_s = now_s + ttl_s
    if salt := carried.get("salt"):  # SGLang's requests for embeddings carry none themselves
        request.cache_salt = salt
    return job


def carried_by(request: Any) -> dict[str, Any]:
    """What the HTTP side noted about its sender."""
    carried = (request.sampling_params.custom_params or {}).get(CUSTOM_PARAMS_KEY)
    return carried if isinstance(carried, dict) else {}


def judge_request(manager: Any, obj: Any, request: Any) -> None:
    """Holds a request against the table of `common.fields` before the scheduler gets any of it: a body of a route that
    the table has as it was sent, so that an error names the sender's own field; whatever else becomes a request of the
    engine by its fields. `obj` is its generate or embedding input. Raises `Wrong`, a ValueError, which SGLang answers
    with 400."""
    if request is None or is_health_check(request):
        return
    facts = _facts(manager.model_config.vocab_size)
    path, body = request.scope.get("path"), getattr(request, "_json", None)
    if path in ROUTES and isinstance(body, dict):
        judge(path, body, facts, at_replica=True)
        return
    for one in fields(obj):
        value, rule = getattr(obj, one.name, None), GENERATE.get(one.name, _ANY)
        if value is not None and value != one.default:
            check(one.name, rule.rule if isinstance(rule, Direct) else rule, value, facts)


_ANY = Rule()


@cache
def _facts(vocabulary: int) -> Facts:
    """Of a model with so many token ids, and of what the operator allows."""
    return config.read().facts._replace(vocabulary=vocabulary)
