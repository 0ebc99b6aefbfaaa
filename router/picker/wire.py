"""The messages of Envoy's ext_proc (`envoy/service/ext_proc/v3/external_processor.proto`), as far as a picker needs
them. A field that stands here has the number and the type that it has there; others are passed over.

Why no package: xds-protos, which has them all, brings an older `opentelemetry/proto` into the folder of the one that
traces need, so the two cannot be installed together.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

SERVICE, METHOD = "envoy.service.ext_proc.v3.ExternalProcessor", "Process"
OVERWRITE = 2
"""`append_action` of a header that takes the place of what there is."""

FULL_DUPLEX_STREAMED = 4
"""Of a `ProtocolConfiguration`."""

_PACKAGE = "sglang_fair.ext_proc"
_STRUCT = ".google.protobuf.Struct"
_SCALARS = {"text": 9, "bytes": 12, "flag": 8, "number": 5}

_MESSAGES: Mapping[str, Mapping[int, str]] = {
    "ProcessingRequest": {
        2: "request_headers HttpHeaders", 3: "response_headers HttpHeaders", 4: "request_body HttpBody",
        5: "response_body HttpBody", 6: "request_trailers HttpTrailers", 7: "response_trailers HttpTrailers",
        8: "metadata_context Metadata", 9: "attributes map", 11: "protocol_config ProtocolConfiguration",
    },
    "ProtocolConfiguration": {1: "request_body_mode number", 2: "response_body_mode number"},
    "ProcessingResponse": {
        1: "request_headers HeadersResponse", 2: "response_headers HeadersResponse", 3: "request_body BodyResponse",
        4: "response_body BodyResponse", 5: "request_trailers HttpTrailers", 6: "response_trailers HttpTrailers",
        7: "immediate_response ImmediateResponse", 8: "dynamic_metadata Struct",
    },
    "HttpHeaders": {1: "headers HeaderMap", 3: "end_of_stream flag"},
    "HttpBody": {1: "body bytes", 2: "end_of_stream flag"},
    "HttpTrailers": {},
    "Metadata": {1: "filter_metadata map"},
    "HeaderMap": {1: "headers HeaderValue*"},
    "HeaderValue": {1: "key text", 2: "value text", 3: "raw_value bytes"},
    "HeaderValueOption": {1: "header HeaderValue", 3: "append_action number"},
    "HeaderMutation": {1: "set_headers HeaderValueOption*", 2: "remove_headers text*"},
    "HeadersResponse": {1: "response CommonResponse"},
    "BodyResponse": {1: "response CommonResponse"},
    "CommonResponse": {
        2: "header_mutation HeaderMutation", 3: "body_mutation BodyMutation", 5: "clear_route_cache flag",
    },
    "BodyMutation": {3: "streamed_response HttpBody"},
    "ImmediateResponse": {1: "status HttpStatus", 2: "headers HeaderMutation", 3: "body bytes", 5: "details text"},
    "HttpStatus": {1: "code number"},
}  # fmt: skip
"""By number, each field's name and type; `*`: any number of them. An answer to trailers, and a piece of a streamed
body, look on the wire like what stands for them here."""


def _field(made: descriptor_pb2.DescriptorProto, number: int, text: str, nested: str) -> None:
    name, _, kind = text.partition(" ")
    field = made.field.add(name=name, number=number, label=3 if kind.endswith("*") or kind == "map" else 1)
    kind = kind.rstrip("*")
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
        return
    field.type = 11
    field.type_name = _STRUCT if kind == "Struct" else f".{_PACKAGE}.{kind}"
    if kind == "map":  # of texts to structs
        entry = made.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
        entry.options.map_entry = True
        entry.field.add(name="key", number=1, label=1, type=9)
        entry.field.add(name="value", number=2, label=1, type=11, type_name=_STRUCT)
        field.type_name = f".{_PACKAGE}.{nested}.{entry.name}"


def _made() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(
        name="sglang_fair/ext_proc.proto", package=_PACKAGE, syntax="proto3"
    )
    file.dependency.append(struct_pb2.DESCRIPTOR.name)
    for message, fields in _MESSAGES.items():
        made = file.message_type.add(name=message)
        for number, text in fields.items():
            _field(made, number, text, message)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in _MESSAGES
    }


messages: Any = SimpleNamespace(**_made())
"""Their classes, by name."""
