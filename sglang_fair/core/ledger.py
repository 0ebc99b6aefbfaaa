"""The ledger: how many tokens and units of service each client was given, and what the engine itself counted.

Every extend token that the engine computes and every output token that it emits is entered once, for a client or for
the system account. Transfers between clients that share a prefix are entered separately and sum to 0 (`payers`). The
engine's own counters come from another source, so that  Σ clients + system = engine  can be checked between any two
steps (`check`).
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SYSTEM = "(system)"
"""The account of work that no client caused: health probes, warm-up, recomputing after a retraction."""

OTHERS = "(others)"
"""The account that has the sum of the clients that were dropped to bound the ledger's length."""


@dataclass(slots=True)
class Usage:
    """What one account was given. `service` is in units of the cost function; cached tokens are free.

    `transferred_units` is what it paid for others' prefixes less what others paid for its own: 0 over all accounts.
    """

    extend_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    service: float = 0.0
    requests: int = 0
    transferred_units: float = 0.0

    def shown(self) -> dict[str, float]:
        """What is served, JSON-ready."""
        return {
            "extend_tokens": self.extend_tokens,
            "output_tokens": self.output_tokens,
            "cached_tokens": self.cached_tokens,
            "service": self.service,
            "transferred_units": self.transferred_units,
        }

    def add(self, other: "Usage") -> None:
        self.extend_tokens += other.extend_tokens
        self.output_tokens += other.output_tokens
        self.cached_tokens += other.cached_tokens
        self.service += other.service
        self.requests += other.requests
        self.transferred_units += other.transferred_units


@dataclass
class Ledger:
    """Usage per account. At most `max_clients` are kept by name; of those that are not kept for good (`keep`), the
    longest unused are added up in `OTHERS`."""

    max_clients: int = 10_000
    total: Usage = field(default_factory=Usage)
    engine_extend_tokens: int = 0
    engine_output_tokens: int = 0
    checks: int = field(default=0, init=False)
    mismatches: int = field(default=0, init=False)
    first_mismatch: Mapping[str, int] | None = field(default=None, init=False)
    _accounts: OrderedDict[str, Usage] = field(default_factory=OrderedDict, repr=False)
    _kept: set[str] = field(default_factory=set, repr=False)

    def record(
        self,
        account: str,
        *,
        extend: int = 0,
        output: int = 0,
        cached: int = 0,
        service: float = 0.0,
        requests: int = 0,
    ) -> None:
        """Enter tokens, requests and `service` (units) that `account` was given."""
        for usage in (self.total, self._account(account)):
            usage.extend_tokens += extend
            usage.output_tokens += output
            usage.cached_tokens += cached
            usage.service += service
            usage.requests += requests

    def transfer(self, account: str, units: float) -> None:
        """Enter what `account` paid for a shared prefix; negative: what it was paid."""
        self.total.transferred_units += units
        self._account(account).transferred_units += units

    def engine_counted(self, *, extend: int = 0, output: int = 0) -> None:
        """Enter tokens that the engine counted, from another source than the charges."""
        self.engine_extend_tokens += extend
        self.engine_output_tokens += output

    def keep(self, account: str) -> None:
        """Keep `account` by name for good. For far fewer than `max_clients`."""
        self._kept.add(account)

    def usage(self, account: str) -> Usage:
        """The usage of `account`; zeros for an unknown one."""
        return self._accounts.get(account, Usage())

    def accounts(self) -> Mapping[str, Usage]:
        return self._accounts

    def check(self) -> bool:
        """Compare with the engine's counters, count the check, and keep the numbers of the first mismatch. O(1).

        Call it between two steps of the engine, when both sides are complete. Returns whether they agree.
        """
        self.checks += 1
        agrees = self._agrees()
        if not agrees:
            self.mismatches += 1
            self.first_mismatch = self.first_mismatch or self._numbers()
        return agrees

    @property
    def ok(self) -> bool:
        """Whether charges and the engine's counters are equal, and were at each check. Valid between two steps."""
        return self._agrees() and not self.mismatches

    def conservation(self) -> Mapping[str, Any]:
        """The comparison as it stands, JSON-ready; does not count as a check."""
        return {
            "ok": self.ok,
            **self._numbers(),
            "checks": self.checks,
            "mismatches": self.mismatches,
            "first_mismatch": self.first_mismatch,
        }

    def _agrees(self) -> bool:
        total = self.total
        return (
            total.extend_tokens == self.engine_extend_tokens
            and total.output_tokens == self.engine_output_tokens
        )

    def _numbers(self) -> dict[str, int]:
        return {
            "charged_extend_tokens": self.total.extend_tokens,
            "engine_extend_tokens": self.engine_extend_tokens,
            "charged_output_tokens": self.total.output_tokens,
            "engine_output_tokens": self.engine_output_tokens,
        }

    def _account(self, account: str) -> Usage:
        usage = self._accounts.get(account)
        if usage is None:
            if len(self._accounts) >= self.max_clients:
                self._fold_oldest()
            usage = self._accounts[account] = Usage()
        else:
            self._accounts.move_to_end(account)
        return usage

    def _fold_oldest(self) -> None:
        others = self._accounts.pop(OTHERS, None) or Usage()
        for _ in range(len(self._accounts)):
            oldest = next(iter(self._accounts))
            if oldest != SYSTEM and oldest not in self._kept:
                others.add(self._accounts.pop(oldest))
                break
            self._accounts.move_to_end(oldest)  # so that the next search does not pass it again
        self._accounts[OTHERS] = others
