"""KV events that distinguish blocks under different extra keys.

An extra key separates cached prefixes, as an adapter and a cache salt do. SGLang's events contain the latter two, and
their block hashes depend on them; the extra key is missing. A router would believe that what is cached under one key is
cached for everybody, and that its eviction evicts everybody's. Here the events contain the key, and it enters the
hashes in the way that SGLang has for adapters.
"""

import sys
from functools import partial
from typing import Any

import msgspec
from sglang.srt.disaggregation import kv_events

from sglang_fair.overlay import releases

RUST_CORE = "sglang.srt.mem_cache.rust_tree_core.adapter"
"""SGLang's radix cache in Rust, if it can be loaded; otherwise SGLang uses one in Python."""

ADAPTER_ID_CHARS = 32
"""SGLang appends an adapter's id to the extra key."""


class BlockStored(kv_events.BlockStored):
    """SGLang's event with the client's `extra_key`, a field that SGLang's readers ignore."""

    extra_key: str | None = None


def named(event: Any, extra_key: str | None) -> Any:
    """`event`; if it is about stored blocks, with the extra key of their node in the cache."""
    if not isinstance(event, kv_events.BlockStored) or not extra_key:
        return event
    given = extra_key[:-ADAPTER_ID_CHARS] if event.lora_name is not None else extra_key
    return BlockStored(**msgspec.structs.asdict(event), extra_key=given or None)


def seed_of(extra_key: str | None) -> bytes | None:
    """The seed of the hashes of blocks under this key."""
    seed: bytes | None = kv_events.kv_event_namespace_seed(extra_key=extra_key or None, cache_salt=None)
    return seed


# -- the Rust core

EXTRA_KEY_AT = {"block_stored": 8, "block_removed": 3}
"""Index of the extra key in the tuples that the Rust core records, by kind of event."""


def from_tagged(original: Any, tagged: tuple[Any, ...], adapters: Any, dynamo_format: bool = False) -> Any:
    """Wraps the function that turns such a tuple into an event."""
    event = original(tagged, adapters, dynamo_format)
    at = EXTRA_KEY_AT.get(tagged[0])
    if at is None or not tagged[at]:
        return event
    if not dynamo_format and adapters.get(tagged[at]) is None:  # otherwise the hashes contain it already
        reseed(event, seed_of(tagged[at]))
    return named(event, tagged[at])


def reseed(event: Any, seed: bytes | None) -> None:
    """Renew the block hashes of `event` with `seed`."""
    renewed = partial(kv_events.namespaced_block_hash, namespace_seed=seed)
    event.block_hashes = [renewed(block) for block in event.block_hashes]
    if getattr(event, "parent_block_hash", None) is not None:
        event.parent_block_hash = renewed(event.parent_block_hash)


def attach() -> None:
    """Wrap the Rust core, if this scheduler's cache uses it and tells of extra keys."""
    if not releases.has("0.5.23"):
        return
    core: Any = sys.modules.get(RUST_CORE)
    if core is not None and not isinstance(core._kv_event_from_tagged, partial):
        core._kv_event_from_tagged = partial(from_tagged, core._kv_event_from_tagged)


# -- the Python core


def namespace_seed(result: bytes | None, recorder: Any, node: Any) -> bytes | None:
    """Runs after SGLang's choice of a seed, which is None except for adapters and in Dynamo's format."""
    return result if result is not None else seed_of(node.key.extra_key)


def record_store(original: Any, recorder: Any, node: Any, *args: Any, **kwargs: Any) -> None:
    """Adds the extra key to the events of one call. Blocks that SGLang appends to the last event before the call
    continue a chain, whose event has the key already."""
    before = len(recorder._queue)
    original(recorder, node, *args, **kwargs)
    recorder._queue[before:] = [named(event, node.key.extra_key) for event in recorder._queue[before:]]
