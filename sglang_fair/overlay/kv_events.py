"""KV events that tell blocks under different extra keys apart.

An extra key keeps cached prefixes apart, as an adapter and a cache salt do. SGLang's events name the latter two, and
their block hashes follow from them; of an extra key they say nothing. A router would take what is cached under
one for everybody's, and its eviction for the eviction of everybody's. Here the key is said, and enters the
hashes in SGLang's own way, which it has for adapters.
"""

import sys
from functools import partial
from typing import Any

import msgspec
from sglang.srt.disaggregation import kv_events

RUST_CORE = "sglang.srt.mem_cache.rust_tree_core.adapter"
"""SGLang's radix cache, where it can be loaded; else one in Python does the same."""

ADAPTER_ID_CHARS = 32
"""SGLang appends an adapter's id to the extra key."""


class BlockStored(kv_events.BlockStored):
    """With the client's `extra_key`, which SGLang's readers pass over."""

    extra_key: str | None = None


def named(event: Any, extra_key: str | None) -> Any:
    """`event`, with the extra key of its node in the cache if it tells of stored blocks."""
    if not isinstance(event, kv_events.BlockStored) or not extra_key:
        return event
    given = extra_key[:-ADAPTER_ID_CHARS] if event.lora_name is not None else extra_key
    return BlockStored(**msgspec.structs.asdict(event), extra_key=given or None)


def seed_of(extra_key: str | None) -> bytes | None:
    """What enters the hashes of blocks under this key."""
    seed: bytes | None = kv_events.kv_event_namespace_seed(extra_key=extra_key or None, cache_salt=None)
    return seed


# -- the Rust core

EXTRA_KEY_AT = {"block_stored": 8, "block_removed": 3}
"""In the tuples that it records."""


def from_tagged(original: Any, tagged: tuple[Any, ...], adapters: Any, dynamo_format: bool = False) -> Any:
    """Around the function that makes an event of such a tuple."""
    event = original(tagged, adapters, dynamo_format)
    at = EXTRA_KEY_AT.get(tagged[0])
    if at is None or not tagged[at]:
        return event
    if not dynamo_format and adapters.get(tagged[at]) is None:  # else the hashes have it already
        reseed(event, seed_of(tagged[at]))
    return named(event, tagged[at])


def reseed(event: Any, seed: bytes | None) -> None:
    """Makes the hashes of `event` others."""
    renewed = partial(kv_events.namespaced_block_hash, namespace_seed=seed)
    event.block_hashes = [renewed(block) for block in event.block_hashes]
    if getattr(event, "parent_block_hash", None) is not None:
        event.parent_block_hash = renewed(event.parent_block_hash)


def attach() -> None:
    """To the Rust core, if this scheduler's cache has it."""
    core: Any = sys.modules.get(RUST_CORE)
    if core is not None and not isinstance(core._kv_event_from_tagged, partial):
        core._kv_event_from_tagged = partial(from_tagged, core._kv_event_from_tagged)


# -- the Python core


def namespace_seed(result: bytes | None, recorder: Any, node: Any) -> bytes | None:
    """After its choice of a seed, which is None but for adapters and in Dynamo's format."""
    return result if result is not None else seed_of(node.key.extra_key)


def record_store(original: Any, recorder: Any, node: Any, *args: Any, **kwargs: Any) -> None:
    """Around it. What joins the last event continues a chain, whose extra key is said."""
    before = len(recorder._queue)
    original(recorder, node, *args, **kwargs)
    recorder._queue[before:] = [named(event, node.key.extra_key) for event in recorder._queue[before:]]
