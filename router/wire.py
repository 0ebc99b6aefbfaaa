"""Bytes to events and back, without sockets: token ids, namespaces, and the KV event batches of a replica.

SGLang publishes a KV batch as the msgpack array `[ts, [event, ...], dp_rank]`, each event a map tagged with its `type`,
before 0.5.20 an array that begins with it (`sglang/srt/disaggregation/kv_events.py`). What is not known of an event is
ignored. An unreadable event is skipped and counted; the rest of its batch is used.
How much a replica has to do comes as a `LoadStat` (`managers/scheduler_components/load_publisher.py`).
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np

from router.events import CacheEvent, Cleared, Load, ProtocolError, Removed, Stored

GPU = "GPU"
"""The storage medium from whose blocks a request can start. Blocks on other media are not followed."""

HEARTBEAT = b""
"""A peer sends it to show that it is alive."""

HEARTBEAT_ANSWER = b"\0"
"""The router's answer. It differs from `HEARTBEAT`, so that a peer notices a socket that is connected to itself.

A TCP connection to a port on which nobody listens can succeed if the port lies in the range of ephemeral ports: the
kernel may choose the same port as the source. The socket then talks to itself and keeps the port taken.
"""

SEQUENCE_BYTES = 8
END_OF_REPLAY = -1


class BlockStored(msgspec.Struct, tag_field="type", tag="BlockStored", gc=False):
    """A replica has cached consecutive blocks after block `parent_block_hash`."""

    block_hashes: tuple[int, ...]
    token_ids: list[int]
    block_size: Annotated[int, msgspec.Meta(ge=1)]
    parent_block_hash: int | None = None
    medium: str | None = None
    cache_salt: str | None = None
    lora_name: str | None = None
    extra_key: str | None = None
    """Only replicas with the overlay send it."""
    extra_keys: list[Any] | None = None
    """Of each block what is hashed beside its tokens, as vLLM has it: with the salt on the first of a prompt."""


class BlockRemoved(msgspec.Struct, tag_field="type", tag="BlockRemoved", gc=False):
    """A replica has evicted blocks."""

    block_hashes: tuple[int, ...]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, tag_field="type", tag="AllBlocksCleared", gc=False):
    """The replica's cache is empty."""


POSITIONS: Mapping[str, tuple[str, ...]] = {
    "BlockStored": (
        "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "metadata",
    ),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}  # fmt: skip
"""The fields of an event that is an array, behind its type. `metadata` is a map with the salt."""


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[msgspec.Raw]


class LoadStat(msgspec.Struct, array_like=True, tag=True, gc=False):
    """What a replica has to do, in tokens of its KV cache. SGLang appends fields that are not read here."""

    num_running_reqs: int
    num_waiting_reqs: int
    num_tokens: int
    max_total_num_tokens: int
    attn_dp_rank: int | None = None
    num_waiting_uncached_tokens: int = 0


class KvBatch(msgspec.Struct, frozen=True, gc=False):
    """One published batch. `published_s` is by the replica's clock."""

    published_s: float
    events: tuple[CacheEvent, ...]
    skipped: int
    """How many events could not be read. Blocks on another medium are left out and not counted."""


_BATCHES = msgspec.msgpack.Decoder(_Batch)
KvEvent = BlockStored | BlockRemoved | AllBlocksCleared
_EVENTS: msgspec.msgpack.Decoder[KvEvent] = msgspec.msgpack.Decoder(KvEvent)
_LOADS = msgspec.msgpack.Decoder(LoadStat)
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError, ValueError, OverflowError)


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32. Raises `ProtocolError` for anything that is not a token id."""
    try:
        return np.asarray(token_ids, dtype="<u4").tobytes()
    except (OverflowError, TypeError, ValueError) as error:
        raise ProtocolError(f"token ids must be integers from 0 to 2^32-1: {error}") from error


def unpack_tokens(tokens: bytes) -> list[int]:
    """The token ids in `tokens`: the inverse of `pack_tokens`."""
    return [int(token) for token in np.frombuffer(tokens, dtype="<u4")]


def namespace(adapter: str | None = None, cache_salt: str | None = None, extra_key: str | None = None) -> str:
    """One string for everything besides tokens that separates cached prefixes; "" if there is nothing.

    SGLang's own KV events carry no extra key. What a replica without the overlay caches under an extra key is taken
    to be cached without one.
    """
    parts = (adapter or "", cache_salt or "", extra_key or "")
    return "\x1f".join(map(_escaped, parts)) if any(parts) else ""


def _escaped(part: str) -> str:
    """Without the separator, so that no two different triples make one namespace."""
    return part.replace("\\", "\\\\").replace("\x1f", "\\s") if "\x1f" in part or "\\" in part else part


def decode_sequence(frame: bytes) -> int:
    """A sequence number: 8 bytes, big-endian, signed. Raises `ProtocolError` for any other length."""
    if len(frame) != SEQUENCE_BYTES:
        raise ProtocolError(f"a sequence number has {SEQUENCE_BYTES} bytes, not {len(frame)}")
    return int.from_bytes(frame, "big", signed=True)


def encode_sequence(sequence: int) -> bytes:
    """The inverse of `decode_sequence`."""
    return sequence.to_bytes(SEQUENCE_BYTES, "big", signed=True)


def published_s(payload: bytes) -> float:
    """When a batch was published, by the replica's clock. Raises `ProtocolError` if it cannot be read."""
    try:
        return _BATCHES.decode(payload).ts
    except _UNREADABLE as error:
        raise ProtocolError(f"not a KV event batch: {error}") from error


def decode_kv_batch(worker: str, payload: bytes) -> KvBatch:
    """The events of a batch of `worker`. Raises `ProtocolError` if the batch as a whole cannot be read."""
    try:
        batch = _BATCHES.decode(payload)
    except _UNREADABLE as error:
        raise ProtocolError(f"not a KV event batch: {error}") from error
    events: list[CacheEvent] = []
    skipped = 0
    for raw in batch.events:
        try:
            event = _cache_event(worker, _read(raw))
        except _UNREADABLE:
            skipped += 1
            continue
        if event is not None:
            events.append(event)
    return KvBatch(batch.ts, tuple(events), skipped)


def decode_load(worker: str, frames: Sequence[bytes]) -> Load:
    """The load in a message of `worker`, `[topic, number, load]`. Raises `ProtocolError` for anything else."""
    if len(frames) != 3:
        raise ProtocolError(f"a load has 3 frames, not {len(frames)}")
    try:
        stat = _LOADS.decode(frames[2])
    except _UNREADABLE as error:
        raise ProtocolError(f"not a load: {error}") from error
    return Load(worker, stat.num_tokens, stat.num_waiting_uncached_tokens, stat.max_total_num_tokens)


def decode_numbered(frames: Sequence[bytes], least: int = 0) -> tuple[int, bytes]:
    """The number, `least` at least, and the payload of `[topic, number, payload]`; replays have no topic before 0.5.22.
    Raises `ProtocolError` for anything else."""
    if len(frames) not in (2, 3) or (sequence := decode_sequence(frames[-2])) < least:
        raise ProtocolError(f"a KV message has 2 or 3 frames and a number, not {list(frames)!r:.100}")
    return sequence, frames[-1]


def _read(raw: msgspec.Raw) -> KvEvent:
    if not 0x90 <= (first := memoryview(raw)[0]) <= 0x9F and first not in (0xDC, 0xDD):  # an array's
        return _EVENTS.decode(raw)
    kind, *values = msgspec.msgpack.decode(raw)
    event = dict(zip(POSITIONS.get(kind, ()), values, strict=False))
    return msgspec.convert({"type": kind, **(event.pop("metadata", None) or {}), **event}, KvEvent)  # type: ignore[no-any-return]


def _salt(extra_keys: Sequence[Any] | None) -> str | None:
    """The one text among the keys of a prompt's first block."""
    first = extra_keys[0] if extra_keys else None
    return next((key for key in first if isinstance(key, str)), None) if isinstance(first, list) else None


def _cache_event(worker: str, event: KvEvent) -> CacheEvent | None:
    if isinstance(event, AllBlocksCleared):
        return Cleared(worker)
    if event.medium not in (None, GPU):
        return None
    if isinstance(event, BlockRemoved):
        return Removed(worker, event.block_hashes)
    if len(event.token_ids) != len(event.block_hashes) * event.block_size:
        raise ProtocolError(
            f"{len(event.token_ids)} tokens are not {len(event.block_hashes)} blocks of {event.block_size}"
        )
    return Stored(
        worker=worker,
        hashes=event.block_hashes,
        parent=event.parent_block_hash,
        tokens=pack_tokens(event.token_ids),
        block_tokens=event.block_size,
        namespace=namespace(event.lora_name, event.cache_salt or _salt(event.extra_keys), event.extra_key),
    )
