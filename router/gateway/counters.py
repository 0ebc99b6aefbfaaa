"""What a gateway process counts, for `GET /status`."""

from collections import Counter
from collections.abc import Mapping

from router.gateway.record import Exchange
from sglang_fair.common.deadlines import ATTAINED


class Counters:
    """Requests by what became of them, and refusals by HTTP status."""

    def __init__(self) -> None:
        self.refusals: Counter[int] = Counter()
        self.ignored_headers: Counter[str] = Counter()
        """Headers that name a client and came from elsewhere than a trusted proxy, by name."""
        self.models: Counter[tuple[str, str]] = Counter()
        """Requests that have ended, by model and outcome."""
        self.classes: Counter[tuple[str, str]] = Counter()
        """The same by class and by what was attained of what it promises."""
        self.of_tenants: dict[str, Counter[tuple[str, str]]] = {}
        """The same for each tenant; of clients there may be any number."""
        self.requests = 0
        self.retried = 0
        """Attempts after one that failed before the client had anything."""
        self.resumed = 0
        """Streams that went on from another replica."""
        self.cut = 0
        """Streams that were cut off because their replica was to load another model."""
        self.placed_in_fallback = 0
        self.failed = 0
        self.left = 0
        """Clients that left before their answer was complete."""
        self.refused = 0

    def ended(self, exchange: Exchange) -> None:
        """A request is over."""
        self.failed += exchange.outcome == "failed"
        self.left += exchange.outcome == "left"
        self.refused += exchange.outcome == "refused"
        if exchange.served_model is not None:
            self.models[exchange.served_model, exchange.outcome] += 1
        if exchange.promise is not None:
            attained = exchange.promise.slo_class, exchange.attained
            self.classes[attained] += 1
            if exchange.is_tenant:
                self.of_tenants.setdefault(exchange.client, Counter())[attained] += 1

    def state(self) -> dict[str, object]:
        """As `/status` shows them."""
        return {
            "refusals": {str(status): count for status, count in sorted(self.refusals.items())},
            "ignored headers": dict(sorted(self.ignored_headers.items())),
            "requests": self.requests,
            "retried": self.retried,
            "resumed": self.resumed,
            "cut": self.cut,
            "placed in fallback": self.placed_in_fallback,
            "failed": self.failed,
            "left": self.left,
            "refused": self.refused,
            "models": by_model(self.models),
            "classes": by_class(self.classes),
        }


def by_model(counts: Mapping[tuple[str, str], float]) -> dict[str, dict[str, float]]:
    """Model -> outcome -> requests that have ended."""
    found: dict[str, dict[str, float]] = {}
    for (model, outcome), count in sorted(counts.items()):
        found.setdefault(model, {})[outcome] = count
    return found


def by_class(counts: Mapping[tuple[str, str], float]) -> dict[str, dict[str, float]]:
    """Class -> requests that have ended, and of these those that met and missed their time; the others did neither."""
    found: dict[str, dict[str, float]] = {}
    for slo_class in sorted({slo_class for slo_class, _ in counts}):
        of = {attained: counts.get((slo_class, attained), 0) for attained in ATTAINED}
        found[slo_class] = {"requests": sum(of.values()), "met": of["met"], "missed": of["missed"]}
    return found
