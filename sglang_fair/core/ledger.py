"""The books: who was given how much service, in tokens, beside what the engine itself counted.

Every extend token that the engine computes and every output token that it emits is entered once, to a
client or to the system account. What clients pay each other for prefixes that they share is entered beside it, and
sums to 0 (`payers`). The engine's own counters are entered independently, so that the
identity  Σ clients + system = engine  can be checked between any two steps (`check`).
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

SYSTEM = "(system)"
"""Work that no client caused: health probes, warm-up, recomputing what the server itself threw away."""

OTHERS = "(others)"
"""The summed usage of clients that were dropped from the list to bound its length."""


@dataclass(slots=True)
class Usage:
    """Tokens by kind, requests, and `service` in the cost function's units, in which cached tokens are free.

    `transferred_units` is what others' prefixes cost it, less what others paid for its own: 0 over all accounts.
    """

    extend_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    service: float = 0.0
    requests: int = 0
    transferred_units: float = 0.0

    def add(self, other: "Usage") -> None:
        self.extend_tokens += other.extend_tokens
        self.output_tokens += other.output_tokens
        self.cached_tokens += other.cached_tokens
        self.service += other.service
        self.requests += other.requests
        self.transferred_units += other.transferred_units


@dataclass(frozen=True, slots=True)
class Conservation:
    """Charged tokens beside the engine's own counters; `ok` when they are equal, and were at each check.

    `checks` and `mismatches` count the calls of `Ledger.check`, and those that found a difference.
    `first_mismatch` has the four numbers of the first of these, by their names here.
    """

    ok: bool
    charged_extend_tokens: int
    engine_extend_tokens: int
    charged_output_tokens: int
    engine_output_tokens: int
    checks: int = 0
    mismatches: int = 0
    first_mismatch: Mapping[str, int] | None = None


@dataclass
class Ledger:
    """Usage per account, at most `max_clients` of them by name."""

    max_clients: int = 10_000
    total: Usage = field(default_factory=Usage)
    engine_extend_tokens: int = 0
    engine_output_tokens: int = 0
    checks: int = field(default=0, init=False)
    mismatches: int = field(default=0, init=False)
    first_mismatch: Mapping[str, int] | None = field(default=None, init=False)
    _accounts: OrderedDict[str, Usage] = field(default_factory=OrderedDict, repr=False)

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
        """Enter what `account` was given."""
        for usage in (self.total, self._account(account)):
            usage.extend_tokens += extend
            usage.output_tokens += output
            usage.cached_tokens += cached
            usage.service += service
            usage.requests += requests

    def transfer(self, account: str, units: float) -> None:
        """Enter what `account` was charged, or if negative paid back, for a prefix that it shares."""
        self.total.transferred_units += units
        self._account(account).transferred_units += units

    def engine_counted(self, *, extend: int = 0, output: int = 0) -> None:
        """Enter what the engine says it did, from a source that the charges do not come from."""
        self.engine_extend_tokens += extend
        self.engine_output_tokens += output

    def usage(self, account: str) -> Usage:
        """What `account` was given; zeros for an unknown one."""
        return self._accounts.get(account, Usage())

    def accounts(self) -> Mapping[str, Usage]:
        return self._accounts

    def check(self) -> bool:
        """Compare with the engine's counters, count that, and keep the numbers of the first mismatch; O(1).
        To be called between two steps of the engine, when both sides have all that was done."""
        self.checks += 1
        if self._agrees():
            return True
        self.mismatches += 1
        if self.first_mismatch is None:
            self.first_mismatch = self._numbers()
        return False

    def conservation(self) -> Conservation:
        """The comparison as it stands, which counts as no check. Valid between steps of the engine."""
        ok = self._agrees() and not self.mismatches
        return Conservation(
            ok,
            **self._numbers(),
            checks=self.checks,
            mismatches=self.mismatches,
            first_mismatch=self.first_mismatch,
        )

    def _agrees(self) -> bool:
        return (
            self.total.extend_tokens == self.engine_extend_tokens
            and self.total.output_tokens == self.engine_output_tokens
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
        for account in self._accounts:
            if account != SYSTEM:
                others.add(self._accounts.pop(account))
                break
        self._accounts[OTHERS] = others
