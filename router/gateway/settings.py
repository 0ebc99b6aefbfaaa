"""What the texts and files in a gateway's settings say. All of these raise SettingError, in one line that names the
setting."""

from collections.abc import Callable
from dataclasses import replace
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import TypeVar

from router.gateway import otlp
from router.gateway.routing.routers import Routers
from sglang_fair.common.deadlines import Classes, make_classes
from sglang_fair.common.fields import Facts
from sglang_fair.common.files import read_json
from sglang_fair.common.identity import DEFAULT_ORDER
from sglang_fair.common.interaction import Apps, make_apps
from sglang_fair.common.pairs import split_pairs, typed
from sglang_fair.settings import protection, table
from sglang_fair.settings.setting import SettingError, settings_of

Made = TypeVar("Made")
Bounded = TypeVar("Bounded", bound=table.Limits)

OTHER_DESCRIPTORS = 128
"""Open files besides connections of clients and of requests."""
Network = IPv4Network | IPv6Network


def check(settings: table.Gateway) -> None:
    """Reads everything once, keys and certificates too, and looks whether it can be reached unprotected."""
    _read("router", "--router: ", lambda: Routers(settings.router))
    protection.read_keys(settings.keys, "gateway")
    protection.check(settings, "host", *(("admin_host",) if settings.admin_port is not None else ()))
    networks(settings)
    if settings.limit_store != table.Access.limit_store:  # what reads these takes long to be imported
        from router.gateway.access.quota import check_store

        check_store(settings.limit_store)
    otlp.check(settings.otlp_traces_endpoint)
    if settings.tenants is not None:
        from sglang_fair.tenants import file

        file.read(Path(settings.tenants))
    folders(settings)
    facts(settings)
    classes(settings)
    apps(settings)


def folders(settings: table.Gateway) -> dict[str, str]:
    """All models, the first one first, each with the folder of its tokenizer."""
    more = _read("more_models", "--more-models: ", lambda: dict(split_pairs(settings.more_models, "model")))
    if settings.model_name in more:
        raise SettingError(f"--more-models: {settings.model_name} is the first model already", "more_models")
    return {settings.model_name: settings.tokenizer, **more}


def places(settings: table.Gateway) -> tuple[str, ...]:
    """Where a client's name is looked for (`common.identity`)."""
    if settings.identity is None:
        return DEFAULT_ORDER
    return tuple(place.strip().lower() for place in settings.identity.split(",") if place.strip())


def networks(settings: table.Gateway) -> tuple[Network, ...] | None:
    return None if settings.trusted_proxies is None else networks_in(settings.trusted_proxies)


def networks_in(text: str) -> tuple[Network, ...]:
    """The networks in `10.0.0.0/8,192.0.2.7,fd00::/8`."""
    parts = filter(None, (part.strip() for part in text.split(",")))
    return _read("trusted_proxies", "--trusted-proxies: ", lambda: tuple(map(ip_network, parts)))


def facts(settings: table.Gateway) -> Facts:
    return _read(
        "allow_fields",
        "--allow-fields: ",
        lambda: Facts.allowing(settings.max_logprobs, settings.allow_fields),
    )


def classes(settings: table.Gateway) -> Classes:
    return _read("slo_classes", "", lambda: make_classes(settings.slo_classes, "--slo-classes"))


def apps(settings: table.Gateway) -> Apps:
    path = settings.apps
    return Apps() if path is None else _read("apps", "", lambda: make_apps(read_json(path), f"--apps {path}"))


def _read(field: str, before: str, read: Callable[[], Made]) -> Made:
    try:
        return read()
    except ValueError as error:
        raise SettingError(f"{before}{error}", field) from None


def fit(limits: Bounded, descriptors: int) -> Bounded:
    """`limits` with which a process that may open so many files does not run out of them.

    A request needs one for its replica, besides its client's connection.
    """
    free = max(3, descriptors - OTHER_DESCRIPTORS)
    requests = min(limits.max_in_flight, max(free // 3, free - limits.max_connections))
    return replace(
        limits, max_in_flight=requests, max_connections=min(limits.max_connections, free - requests)
    )


def limits_in(text: str) -> dict[str, int | float]:
    """The limits in `max-in-flight=100,body-timeout=60`, by field.

    Raises ValueError, in one line, for what is no pair, given twice, no limit, or no value that it may have.
    """
    known = {setting.key: setting for setting in settings_of(table.Limits).values()}
    found: dict[str, int | float] = {}
    for key, value in split_pairs(text, "limit"):
        setting = known.get(key.replace("-", "_").removeprefix("__"))
        if setting is None:
            names = ", ".join(one.flag.removeprefix("--") for one in known.values())
            raise ValueError(f"a gateway has no limit {key!r:.80}; there are {names}")
        if setting.field in found:
            raise ValueError(f"limit {key!r:.80} is given twice")
        number = typed(value, setting.kind, f"limit {key}")
        setting.check(number, f"limit {key}")
        found[setting.field] = number
    return found
