"""Bytes to events and back, without a socket: token ids, namespaces and a replica's KV event batches.

SGLang publishes a KV batch as the msgpack array `[ts, [event, ...], dp_rank]`, each event a map tagged
`type` (`sglang/srt/disaggregation/kv_events.py`). One event that makes no sense costs that event, not
its batch: the count of what was skipped is returned beside what was understood.
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np

from router.events import CacheEvent, Cleared, ProtocolError, Removed, Stored

GPU = "GPU"
"""The only storage medium whose blocks a request can start from; others are not followed."""

HEARTBEAT = b""
"""The message of a peer that is alive."""

HEARTBEAT_ANSWER = b"\0"
"""What the router sends back. Another than `HEARTBEAT`, so that a socket connected to itself is noticed.

A TCP connection to a port that nobody listens on can succeed when that port lies in the range of outgoing
ones: the kernel may pick it as the source, and the socket then talks to itself and keeps the port taken.
"""

SEQUENCE_BYTES = 8
END_OF_REPLAY = -1


class BlockStored(msgspec.Struct, tag_field="type", tag="BlockStored", gc=False):
    """Consecutive blocks that entered a replica's cache after block `parent_block_hash`."""

    block_hashes: tuple[int, ...]
    token_ids: list[int]
    block_size: Annotated[int, msgspec.Meta(ge=1)]
    parent_block_hash: int | None = None
    medium: str | None = None
    cache_salt: str | None = None
    lora_name: str | None = None
    extra_key: str | None = None
    """Said by replicas with the overlay alone."""


class BlockRemoved(msgspec.Struct, tag_field="type", tag="BlockRemoved", gc=False):
    """Blocks that left a replica's cache."""

    block_hashes: tuple[int, ...]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, tag_field="type", tag="AllBlocksCleared", gc=False):
    """The replica's cache is empty."""


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[msgspec.Raw]


class KvBatch(msgspec.Struct, frozen=True, gc=False):
    """One published batch: when (the replica's clock), what it means, and how many events were skipped."""

    published_s: float
    events: tuple[CacheEvent, ...]
    skipped: int
    """Events that are not of this protocol. Blocks on another medium are understood, and left out."""


_BATCHES = msgspec.msgpack.Decoder(_Batch)
_EVENTS = msgspec.msgpack.Decoder(BlockStored | BlockRemoved | AllBlocksCleared)
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError, OverflowError)


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32. Raises `ProtocolError` for one that is none."""
    try:
        return np.asarray(token_ids, dtype="<u4").tobytes()
    except (OverflowError, TypeError, ValueError) as error:
        raise ProtocolError(f"token ids must be integers from 0 to 2^32-1: {error}") from error


def unpack_tokens(tokens: bytes) -> list[int]:
    """The ids in `tokens`."""
    return [int(token) for token in np.frombuffer(tokens, dtype="<u4")]


def namespace(adapter: str | None = None, cache_salt: str | None = None, extra_key: str | None = None) -> str:
    """One text for all that separates cached prefixes besides their tokens; "" when nothing does.

    SGLang's own KV events carry no extra key: of a replica without the overlay, what is cached under one is taken
    to be cached under none.
    """
    parts = (adapter or "", cache_salt or "", extra_key or "")
    return "\x1f".join(parts) if any(parts) else ""


def decode_sequence(frame: bytes) -> int:
    """A sequence number: 8 bytes, big-endian, signed. Raises `ProtocolError` for another length."""
    if len(frame) != SEQUENCE_BYTES:
        raise ProtocolError(f"a sequence number has {SEQUENCE_BYTES} bytes, not {len(frame)}")
    return int.from_bytes(frame, "big", signed=True)


def encode_sequence(sequence: int) -> bytes:
    """The frame of a sequence number."""
    return sequence.to_bytes(SEQUENCE_BYTES, "big", signed=True)


def published_s(payload: bytes) -> float:
    """When a batch was published, by the replica's clock. Raises `ProtocolError` when it cannot be read."""
    try:
        return _BATCHES.decode(payload).ts
    except _UNREADABLE as error:
        raise ProtocolError(f"not a KV event batch: {error}") from error


def decode_kv_batch(worker: str, payload: bytes) -> KvBatch:
    """What `worker` published. Raises `ProtocolError` when the batch as a whole cannot be read."""
    try:
        batch = _BATCHES.decode(payload)
    except _UNREADABLE as error:
        raise ProtocolError(f"not a KV event batch: {error}") from error
    events: list[CacheEvent] = []
    skipped = 0
    for raw in batch.events:
        try:
            event = _cache_event(worker, _EVENTS.decode(raw))
        except _UNREADABLE:
            skipped += 1
            continue
        if event is not None:
            events.append(event)
    return KvBatch(batch.ts, tuple(events), skipped)


def _cache_event(worker: str, event: BlockStored | BlockRemoved | AllBlocksCleared) -> CacheEvent | None:
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
        namespace=namespace(event.lora_name, event.cache_salt, event.extra_key),
    )
