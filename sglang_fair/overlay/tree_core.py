"""SGLang's prefix cache with our order of eviction: its own Python tree, whose full-attention leaves `FairEviction`
chooses.

SGLang registers tree cores by name. Ours derives from the Python one and tells the rule what happens to nodes: made,
divided, free to go, gone. The tree in Rust, SGLang's default, evicts by LRU and says nothing of its nodes, so it cannot
be asked. What leaving it costs is in docs/measurements.md.

The rule is had where the cache is the plain one: full attention, on the device alone. With HiCache, an external cache,
sliding windows, Mamba states, sessions or another policy of eviction SGLang's own order stays, with a line in the log.
"""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.tree_core_registry import (
    get_tree_core_factory,
    register_tree_core_backend,
)
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore, UnifiedTreeNode
from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import EvictDeviceNextNodeResult
from sglang.srt.runtime_context import get_disagg, get_memory, get_schedule

from sglang_fair.common.weights import Weights
from sglang_fair.core.eviction import NO_CLAIMS, FairEviction, Piece
from sglang_fair.core.job import Job
from sglang_fair.overlay import config

logger = logging.getLogger(__name__)

BACKEND = "sglang-fair"
"""The name of our tree core in SGLang's registry."""
SINCE = "0.5.22"
"""The first release of SGLang that says when a request's part of the tree was used."""


class FairNode(UnifiedTreeNode, Piece):
    """A node of SGLang's tree that the rule knows."""

    def __init__(self, core: "FairTreeCore", priority: int) -> None:
        UnifiedTreeNode.__init__(self, core.component_types, priority)
        self.leaves = None
        self.claims = NO_CLAIMS
        self._core = core

    @property
    def used(self) -> float:  # type: ignore[override]
        return float(self.last_access_time)

    @property
    def size(self) -> int:
        return len(self.key)

    @property
    def free(self) -> bool:
        return self in self._core.evictable_device_leaves


class FairTreeCore(UnifiedTreeCore):
    """The tree of one scheduler, whose pool holds `capacity` tokens."""

    def __init__(self, params: Any, components: Any, capacity: int, weights: Weights) -> None:
        self._capacity, self._weights = capacity, weights
        self._stored = 0
        """Tokens that were inserted since the last use."""
        self._wanted = 0
        """Tokens that the eviction under way shall have freed in the end."""
        super().__init__(params, components)

    def reset(self) -> None:
        self.order = FairEviction(self._capacity, self._weights)
        self._stored = 0
        super().reset()

    def follow(self, weights: Weights) -> None:
        """The clients' weights are these from now on; `order.reweigh` is to be called for one that changes."""
        self._weights = weights
        self.order.follow(weights)

    def use(self, client: str | None, node_id: int) -> None:
        """A request of `client` is served, with the path to this node; None: one of the server's own."""
        stored, self._stored = self._stored, 0
        self.order.use(client, self._path(node_id), stored)

    def _path(self, node_id: int) -> Iterator[FairNode]:
        node = self.node_by_id(node_id)
        while node is not self.root_node:
            yield node
            node = node.parent

    # ---- what the tree says of its nodes

    def _new_node(self, priority: int = 0) -> FairNode:
        node = FairNode(self, priority)
        self._register_node(node)
        return node

    def _add_new_node(self, *args: Any, **kwargs: Any) -> Any:
        node = super()._add_new_node(*args, **kwargs)
        self._stored += node.size
        return node

    def _split_node(self, key: Any, child: Any, split_len: int) -> Any:
        upper, action = super()._split_node(key, child, split_len)
        self.order.divided(upper, child)
        return upper, action

    def _update_evictable_leaf_sets(self, node: Any) -> None:
        super()._update_evictable_leaf_sets(node)
        if node in self.evictable_device_leaves:
            self.order.add(node)

    def _unregister_node(self, node: Any) -> None:
        super()._unregister_node(node)
        self.order.forget(node)

    # ---- eviction, which the cache drives leaf by leaf

    def evict_device_start(self, component_type: ComponentType, request_cnt: int) -> None:
        assert component_type == ComponentType.FULL
        self._wanted = request_cnt

    def evict_device_next_node(self, component_type: ComponentType, tracker: dict[ComponentType, int]) -> Any:
        result = EvictDeviceNextNodeResult()
        if tracker[ComponentType.FULL] < self._wanted and (piece := self.order.take()) is not None:
            assert isinstance(piece, FairNode)
            result.node_id = piece.id
            result.made_progress = True
        return result

    def evict_device_end(self, component_type: ComponentType) -> None:
        self._wanted = 0


def select_tree_core_backend(result: str, params: Any) -> str:
    """A hook on SGLang's choice of the tree core: ours, where fair eviction is wanted and can be had."""
    found = config.read()
    if found.cache_share != "on" or params.disable:
        return result
    ours = config.SERVER_POLICIES.get(get_schedule().schedule_policy)
    if ours is None or found.make_policy(ours).weights is None:
        return result
    reason = _why_not(params)
    if reason is not None:
        logger.warning("sglang-fair: the cache is not shared out fairly among clients: %s", reason)
        return result
    if get_tree_core_factory(BACKEND) is None:
        register_tree_core_backend(BACKEND, _make)
    return BACKEND


def _make(params: Any, components: Any) -> FairTreeCore:
    capacity = int(params.token_to_kv_pool_allocator.size)
    return FairTreeCore(params, components, capacity, Weights(config.read().client_weights))


def _why_not(params: Any) -> str | None:
    """What this cache has that the rule does not know."""
    memory = get_memory()
    for present, what in (
        (tuple(params.tree_components) != (ComponentType.FULL,), "the model has more than full attention"),
        (params.component_registry_override, "a component of the cache is another one"),
        (params.eviction_policy.lower() != "lru", f"--radix-eviction-policy is {params.eviction_policy}"),
        (memory.enable_hierarchical_cache, "--enable-hierarchical-cache"),
        (memory.enable_unified_cache_external_linker, "an external cache"),
        (params.enable_session_radix_cache, "--enable-session-radix-cache"),
        (params.token_to_kv_pool_allocator is None, "there is no pool"),
        (get_disagg().disaggregation_mode != "null", "prefill and decode are on different servers"),
    ):
        if present:
            return what
    return None


def served(cache: Any, request: Any, job: Job | None) -> None:
    """`request` is in a batch, or what it computed is in the cache: its client uses the path that it has locked."""
    core = getattr(cache, "tree_core", None)
    if isinstance(core, FairTreeCore) and request.last_node is not None:
        core.use(None if job is None or job.system else job.client, request.last_node)


def follow(cache: Any, weights: Weights | None) -> None:
    """Share the cache out by these weights, where it is shared out."""
    core = getattr(cache, "tree_core", None)
    if isinstance(core, FairTreeCore) and weights is not None:
        core.follow(weights)


def reweigh(cache: Any, client: str) -> None:
    """The weight of `client` has changed."""
    core = getattr(cache, "tree_core", None)
    if isinstance(core, FairTreeCore):
        core.order.reweigh(client)


def held(cache: Any) -> Mapping[str, float] | None:
    """What each client holds of the cache, tokens; None where it is not shared out."""
    core = getattr(cache, "tree_core", None)
    return core.order.held() if isinstance(core, FairTreeCore) else None
