"""Envoy's configuration as a gateway that asks an endpoint picker, and as one that asks nobody."""

from collections.abc import Sequence
from typing import Any

_V3 = "type.googleapis.com/envoy.extensions"
DESTINATION = "x-gateway-destination-endpoint"


def config(
    port: int,
    replicas: Sequence[int],
    picker: int | None = None,
    *,
    tls: bool = False,
    fails_open: bool = False,
    message_timeout_s: float = 5.0,
) -> dict[str, Any]:
    """An Envoy that listens at `port`, for replicas at these ports, all of this machine. `picker`: the port of the one
    it asks, by `tls` perhaps; None: it deals requests out in turn. `fails_open`: without a picker it serves all the
    same."""
    return {
        "static_resources": {
            "listeners": [
                _listener(port, picker, fails_open=fails_open, message_timeout_s=message_timeout_s)
            ],
            "clusters": [_pool(replicas, picker is not None)]
            + ([] if picker is None else [_picker(picker, tls=tls)]),
        }
    }


def _listener(port: int, picker: int | None, *, fails_open: bool, message_timeout_s: float) -> dict[str, Any]:
    route = {
        "cluster": "pool",
        "timeout": "0s",
        "retry_policy": {"retry_on": "connect-failure,refused-stream,reset-before-request", "num_retries": 2},
    }
    router = {"name": "router", "typed_config": {"@type": f"{_V3}.filters.http.router.v3.Router"}}
    asks = {
        "@type": f"{_V3}.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}},
        "failure_mode_allow": fails_open,
        "message_timeout": f"{message_timeout_s}s",
        "processing_mode": {
            "request_header_mode": "SEND",
            "request_body_mode": "FULL_DUPLEX_STREAMED",
            "request_trailer_mode": "SEND",
            "response_header_mode": "SEND",
            "response_body_mode": "FULL_DUPLEX_STREAMED",
            "response_trailer_mode": "SEND",
        },
        "response_attributes": ["upstream.address"],
        "metadata_options": {
            "forwarding_namespaces": {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]},
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
        },
    }
    filters = [router] if picker is None else [{"name": "picker", "typed_config": asks}, router]
    manager = {
        "@type": f"{_V3}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "http",
        "stream_idle_timeout": "0s",
        "route_config": {
            "virtual_hosts": [
                {"name": "all", "domains": ["*"], "routes": [{"match": {"prefix": "/"}, "route": route}]}
            ]
        },
        "http_filters": filters,
    }
    chain = {"filters": [{"name": "http", "typed_config": manager}]}
    return {"name": "http", "address": _address(port), "filter_chains": [chain]}


def _pool(replicas: Sequence[int], is_picked: bool) -> dict[str, Any]:
    """Its hosts are those that a picker may name; others it names are replaced by one of these."""
    policies = f"{_V3}.load_balancing_policies"
    in_turn = {"name": "in turn", "typed_config": {"@type": f"{policies}.round_robin.v3.RoundRobin"}}
    named = {
        "@type": f"{policies}.override_host.v3.OverrideHost",
        "override_host_sources": [{"header": DESTINATION}],
        "fallback_policy": {"policies": [{"typed_extension_config": in_turn}]},
    }
    chosen = {"name": "picked", "typed_config": named} if is_picked else in_turn
    return {
        **_cluster("pool", replicas),
        "load_balancing_policy": {"policies": [{"typed_extension_config": chosen}]},
    }


def _picker(port: int, *, tls: bool) -> dict[str, Any]:
    options = f"{_V3}.upstreams.http.v3.HttpProtocolOptions"
    http2 = {
        options.partition("/")[2]: {"@type": options, "explicit_http_config": {"http2_protocol_options": {}}}
    }
    shown = {"name": "tls", "typed_config": {"@type": f"{_V3}.transport_sockets.tls.v3.UpstreamTlsContext"}}
    made = {**_cluster("picker", [port]), "typed_extension_protocol_options": http2}
    return {**made, "transport_socket": shown} if tls else made


def _cluster(name: str, ports: Sequence[int]) -> dict[str, Any]:
    hosts = [{"endpoint": {"address": _address(port)}} for port in ports]
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "2s",
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": hosts}]},
    }


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}
