"""Requests at a time, of all gateways together: in the store each tenant has a set of those that are under way.

Rule. A request enters if fewer than the limit are in its tenant's set, and has a lease of `LEASE_S` there by the
store's clock; its process renews the leases of all its own requests three times as often as they end.
Bound. Never more than the limit are in the set. A process that dies gives its requests back `LEASE_S` later.
Leaks. Where the store has lost its sets, or does not answer for longer than a lease, others may enter in place of
requests that are still under way; those are in the set again with the next renewal.
"""

from collections.abc import Iterable
from typing import Any

LEASE_S = 15.0

_NOW = "local t = redis.call('TIME') local now = t[1] * 1000 + math.floor(t[2] / 1000) "
_ENTER = (
    _NOW
    + """redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
if redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[3]) then return 0 end
redis.call('ZADD', KEYS[1], now + ARGV[1], ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return 1"""
)
_RENEW = (
    _NOW
    + """for at = 2, #ARGV do redis.call('ZADD', KEYS[1], now + ARGV[1], ARGV[at]) end
redis.call('PEXPIRE', KEYS[1], ARGV[1])"""
)
_COUNT = _NOW + "return redis.call('ZCOUNT', KEYS[1], now, '+inf')"


class Leases:
    """The sets in one Redis. Whatever its client library raises is passed on."""

    def __init__(self, redis: Any, lease_s: float = LEASE_S) -> None:
        self._redis = redis
        self._lease_ms = int(1e3 * lease_s)
        self._enter, self._renew, self._count = (
            redis.register_script(text) for text in (_ENTER, _RENEW, _COUNT)
        )

    async def enter(self, tenant: str, request: str, limit: int) -> bool:
        return bool(await self._enter(keys=[_key(tenant)], args=[self._lease_ms, request, limit]))

    async def renew(self, tenant: str, requests: Iterable[str]) -> None:
        await self._renew(keys=[_key(tenant)], args=[self._lease_ms, *requests])

    async def leave(self, tenant: str, requests: Iterable[str]) -> None:
        await self._redis.zrem(_key(tenant), *requests)

    async def count(self, tenant: str) -> int:
        return int(await self._count(keys=[_key(tenant)]))


def _key(tenant: str) -> str:
    return f"sglang-fair/at-once/{tenant}"
