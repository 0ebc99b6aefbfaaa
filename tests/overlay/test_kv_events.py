"""Blocks that an extra key keeps apart are apart in the router's tree too."""

from array import array
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from router.wire import decode_kv_batch, namespace
from sglang_fair.overlay import releases

ADAPTER = "a" * 32


def batch(**more: Any) -> bytes:
    stored = {
        "type": "BlockStored",
        "block_hashes": [1],
        "parent_block_hash": None,
        "token_ids": [7],
        "block_size": 1,
    }
    return msgspec.msgpack.encode([1.0, [stored | more], 0])


def test_an_extra_key_is_part_of_the_namespace() -> None:
    def of(**more: Any) -> str:
        [event] = decode_kv_batch("r0", batch(**more)).events
        return event.namespace  # type: ignore[union-attr]

    assert of() == namespace()
    assert of(extra_key="k") == namespace(extra_key="k")
    assert of(extra_key="k", cache_salt="s", lora_name="a") == namespace("a", "s", "k")
    assert len({of(), of(extra_key="k"), of(cache_salt="k"), of(lora_name="k")}) == 4


@pytest.mark.engine
@pytest.mark.skipif(not releases.has("0.5.23"), reason="older caches in Rust do not tell of extra keys")
def test_the_overlay_says_the_extra_key_and_hashes_it(sglang: None) -> None:
    """As SGLang encodes it, and as the router reads it."""
    from sglang.srt.disaggregation import kv_events

    from sglang_fair.overlay import kv_events as ours

    names = {ADAPTER: "a", "k" + ADAPTER: "a"}

    def stored(extra_key: str | None) -> Any:
        def made(*_: Any) -> Any:
            return kv_events.BlockStored(
                [2, 3], 1, [7, 8], 1, None, "GPU", "s", None, names.get(extra_key or "")
            )

        tagged = ("block_stored", [2, 3], 1, [7, 8], 1, "GPU", "s", None, extra_key)
        event = ours.from_tagged(made, tagged, names, False)
        [found] = decode_kv_batch("r0", msgspec.msgpack.encode(kv_events.KVEventBatch(1.0, [event]))).events
        return found

    def removed(extra_key: str | None) -> list[int]:
        tagged = ("block_removed", [2, 3], "GPU", extra_key)
        return ours.from_tagged(lambda *_: kv_events.BlockRemoved([2, 3]), tagged, names, False).block_hashes

    plain, other, adapted = stored(None), stored("k"), stored("k" + ADAPTER)
    assert (plain.namespace, plain.hashes, plain.parent) == (namespace(None, "s"), (2, 3), 1)
    assert other.namespace == namespace(None, "s", "k")
    assert not {*other.hashes, other.parent} & {1, 2, 3}
    assert (adapted.namespace, adapted.hashes) == (namespace("a", "s", "k"), (2, 3)), "SGLang hashes adapters"
    assert stored(ADAPTER).namespace == namespace("a", "s")
    assert removed(None) == [2, 3]
    assert removed("k") == list(other.hashes)
    assert removed("k" + ADAPTER) == [2, 3]


@pytest.mark.engine
@pytest.mark.skipif(not releases.has("0.5.22"), reason="older caches have no seed of a namespace")
def test_the_python_core_says_it_too(sglang: None) -> None:
    from sglang.srt.mem_cache.events import KVCacheEventRecorder

    from sglang_fair.overlay import kv_events as ours

    class Recorder(KVCacheEventRecorder):
        def _namespace_seed(self, node: Any) -> bytes | None:
            return ours.namespace_seed(super()._namespace_seed(node), self, node)

    def node(extra_key: str | None) -> Any:
        key = RadixKey(array("q", [7, 8]), extra_key)
        root = SimpleNamespace(parent=None, hash_value=[], event_hash_value=None, key=RadixKey(array("q")))
        return SimpleNamespace(key=key, parent=root, hash_value=None, event_hash_value=None)

    from sglang.srt.mem_cache.radix_cache import RadixKey

    def events(extra_key: str | None) -> list[Any]:
        recorder = Recorder(enabled=True, page_size=1)
        ours.record_store(KVCacheEventRecorder.record_store, recorder, node(extra_key))
        recorder.record_remove(node(extra_key))
        return recorder.take()

    (plain, gone), (other, other_gone) = events(None), events("k")
    assert not hasattr(plain, "extra_key")
    assert other.extra_key == "k"
    assert gone.block_hashes == plain.block_hashes
    assert other_gone.block_hashes == other.block_hashes
    assert not set(plain.block_hashes) & set(other.block_hashes)
