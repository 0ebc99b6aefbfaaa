"""Whose turn a step of the engine is: prompts of waiting requests, or a token for each running one.

An engine computes prompts before anything else, so a client that sends prompts one after the other stops all that run.
This rule makes the engine's time a shared resource:

    share       of a client: its weight over the weights of all who are here, at least `LEAST_SHARE`
    lag         how far a client that runs is behind its share of the time, in seconds; never negative
    the rule    a prefill step is formed unless a client that runs, other than the one whose prompt is next, is more
                than `patience_s` behind. If one is, the engine decodes
    chunks      no step takes longer than `stall_s` while another client is here (`chunk_tokens`)
    backlogged  a client whose last prompt waited longer than `BACKLOGGED` times `stall_s`: its share of service
                holds it up, not a step. Where steps are mixed it has a token in each, and no more: no step is
                shorter and none is left out for it. While all who are here, or were lately, are backlogged, a step
                may take `ALONE` times as long
    target      a client's prompts are held back while a token would take longer than `target_s`, the client has more
                of the requests that run than its share, and another client has fewer (`holds_back`)

Bound: over any time T in which a client runs, and is not backlogged where steps are mixed, it is served for at least
share · T - patience - (1 + unseen) · share · L, L the longest prefill step. Prefill steps that are `forced`, because
there is no memory for a decode step, do not count. Prompts get 1 - share of the time. The rule only chooses between two
kinds of work: the engine is never idle for it. Proofs, and why a client at its share is never held back:
docs/policies.md, "Whoever runs has a share too".
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from sglang_fair.common.weights import Weights
from sglang_fair.core.job import Job
from sglang_fair.core.ledger import SYSTEM
from sglang_fair.core.listener import Listener
from sglang_fair.core.places import ROUNDING
from sglang_fair.core.policy import Policy
from sglang_fair.core.step_times import Chunks, TokenTimes

DEFAULT_STALL_MS = 100.0

LEAST_SHARE = 1 / 8
"""Part of the time that decode steps get at least, if one client runs and another has prompts."""

MIXED = 1.1
"""A mixed step may last so many times as long as the share of a client that decodes pays for."""

RECENT_S = 60.0
"""A client that left so long ago may come back at any time."""

ALONE = 4
"""So many times as long may prefill steps be for a client that is alone, and for clients that are backlogged."""

BACKLOGGED = 8
"""A prompt that is next waits for one step at most, and one more where a prompt was cut. So one that waited for so many
times `stall_s`, two of the longest steps, waited for its turn."""

LONGEST_STEP_S = 10.0
"""A longer step counts as so long: then the machine stood still, and no client made it."""


def checked_stall_ms(stall_ms: float) -> float:
    """`stall_ms`; ValueError unless it is a finite number from 0 on."""
    if not 0 <= stall_ms < inf:
        raise ValueError(f"stall_ms must be a number of milliseconds from 0 on, not {stall_ms!r}")
    return stall_ms


def checked_target_tpot_ms(target_tpot_ms: float | None, stall_ms: float) -> float | None:
    """`target_tpot_ms`; ValueError unless it is None or a finite number from 0 on, and 0 or None where `stall_ms` is
    0."""
    if target_tpot_ms is not None and not 0 <= target_tpot_ms < inf:
        raise ValueError(f"target_tpot_ms must be a number of milliseconds from 0 on, not {target_tpot_ms!r}")
    if target_tpot_ms and not stall_ms:
        raise ValueError("target_tpot_ms is part of the rule that stall_ms 0 switches off")
    return target_tpot_ms


def make_steps(
    policy: Policy,
    stall_ms: float,
    target_tpot_ms: float | None = None,
    *,
    unseen: int = 0,
    mixes: bool = False,
) -> "Steps | None":
    """The rule beside `policy`. None if that shares nothing among clients, and if `stall_ms` is 0."""
    checked_target_tpot_ms(target_tpot_ms, stall_ms)
    if not policy.shares_steps or not checked_stall_ms(stall_ms):
        return None
    target_s = None if target_tpot_ms is None else target_tpot_ms / 1000
    return Steps(stall_ms / 1000, policy.weights, target_s=target_s, unseen=unseen, mixes=mixes)


@dataclass(slots=True)
class Present:
    """A client with requests here."""

    weight: float
    lag_s: float = 0.0
    requests: int = 0
    decoding: int = 0
    """Of them: those whose prompt is computed."""
    joined: int = 0
    """The number of steps that were over when it began to decode."""
    running: int = 0
    """Of its requests: those that were admitted."""
    backlogged: bool = False


class PromptsFirst(Listener):
    """The rule without shares: prompts go first, whatever runs."""

    mixes: bool = False
    """Those that run get a token in steps for prompts too."""

    def whole_tokens(self) -> int:
        """Of a prompt that goes before one that was cut, the most that one step may have."""
        return 0

    def chunk_tokens(self) -> int | None:
        """Most prompt tokens of a step that is formed now; None: as many as the engine will."""
        return None

    def may_prefill(self, job: Job) -> bool:
        """Whether a prefill step may be formed for, or joined by, the prompt of `job`."""
        return True

    def holds_back(self, job: Job) -> bool:
        """Whether the prompt of `job`, none of the server's own, may not be admitted now, for the target."""
        return False

    def forced(self) -> None:
        """The next step is for prompts although a client is behind, for no decode step could be made."""

    def put_off(self) -> None:
        """Prompts were put off for a pass."""

    def set_aside(self, clients: int = 1) -> None:
        """The prompts of so many clients were put off for a pass, for the target or for places."""


class Steps(PromptsFirst):
    """The rule and what it needs to know. All times are seconds of the caller's clock. The server's own requests have
    no part in it.

    `weights` are the clients' shares, None: equal ones. `stall_s` is the longest prefill step while others are here.
    `target_s` is the time of a token from which on those above their share are held back; 0: none is, None: it follows
    from the shares.
    `unseen`: how many steps may be under way, unseen, when the next one is decided.
    """

    def __init__(
        self,
        stall_s: float,
        weights: Weights | None = None,
        *,
        target_s: float | None = None,
        unseen: int = 0,
        mixes: bool = False,
    ) -> None:
        self.stall_s = stall_s
        self.mixes = mixes
        self.target_s = target_s
        self.held_back = 0
        """How often a client's prompts were held back for a pass, for the target."""
        self.patience_s = LEAST_SHARE * stall_s
        self.held = 0
        """How often a prefill was put off."""
        self.largest_lag_s = 0.0
        self._largest_growth_s = 0.0
        self._unseen = unseen
        self._weights = weights or Weights()
        self._now_s = 0.0
        self._present: dict[str, Present] = {}
        self._weight = 0.0
        """Of all that are present."""
        self._left: OrderedDict[str, tuple[float, Present]] = OrderedDict()
        """Clients that left lately, and when."""
        self._light = 0
        """Clients that are here, or were lately, and are not backlogged."""
        self._decoding: dict[str, Present] = {}
        self._lagging: dict[str, Present] = {}
        """Those that decode and have a lag. A decode step changes no others."""
        self._behind: set[str] = set()
        """Those that decode and are more than the patience behind."""
        self._steps = 0
        self._counts_from = 0
        """The first step for prompts that may put those that run behind."""
        self._decode_s = 0.0
        """Length of a decode step, lately."""
        self._running = 0
        """Requests that were admitted, of all clients."""
        self._runners: dict[str, Present] = {}
        """The clients that have such requests."""
        self._running_weight = 0.0
        """Of them."""
        self._decoding_requests = 0
        self._tokens = TokenTimes()
        self._chunks = Chunks()
        self._paced = Chunks()
        """Of mixed steps, beside clients that decode."""

    # ---- which clients are here

    def tick(self, now_s: float) -> None:
        self._now_s = now_s

    def arrive(self, job: Job) -> None:
        if job.system:
            return
        client = job.client
        present = self._present.get(client)
        if present is None:
            self._forget_old()
            if client in self._left:
                _, present = self._left.pop(client)
                present.weight = self._weights.of(client)
            else:
                present = Present(self._weights.of(client))
                self._light += 1
            self._present[client] = present
            self._weight += present.weight
        present.requests += 1

    def leave(self, job: Job) -> None:
        if job.system:
            return
        client = job.client
        present = self._present[client]
        present.requests -= 1
        if not present.requests:
            del self._present[client]
            if present.weight < self._weight - present.weight:
                self._weight -= present.weight
            else:  # it outweighed all others together: of a difference, rounding would leave nothing right
                self._sum_weights()
            self._left[client] = self._now_s, present

    def admit(self, job: Job) -> None:
        if job.system:
            return
        present = self._present[job.client]
        if not job.retractions and job.waited_for is None:  # what it waited for was its turn
            backlogged = self._now_s - job.arrived_s > BACKLOGGED * self.stall_s
            self._light += present.backlogged - backlogged
            present.backlogged = backlogged
        present.running += 1
        self._running += 1
        if present.running == 1:
            self._runners[job.client] = present
            self._running_weight += present.weight

    def computed(self, job: Job) -> None:
        if job.system:
            return
        present = self._present[job.client]
        job.decoding = True
        self._decoding_requests += 1
        present.decoding += 1
        if present.decoding == 1:
            present.joined = self._steps
            self._decoding[job.client] = present
            self._sort(job.client, present)

    def retract(self, job: Job) -> None:
        if job.system:
            return
        client = job.client
        present = self._present[client]
        if job.decoding:
            job.decoding = False
            self._decoding_requests -= 1
            present.decoding -= 1
            if not present.decoding:
                present.lag_s = min(present.lag_s, self.patience_s)
                del self._decoding[client]
                self._lagging.pop(client, None)
                self._behind.discard(client)
        present.running -= 1
        self._running -= 1
        if not present.running:
            del self._runners[client]
            if present.weight < self._running_weight - present.weight:
                self._running_weight -= present.weight
            else:  # see `leave`
                self._sum_running_weights()

    def evict(self, job: Job, urgent: Job) -> None:
        self.retract(job)

    def finish(self, job: Job, outcome: str) -> None:
        self.retract(job)
        self.leave(job)

    def reweigh(self, client: str) -> None:
        """The weight of `client` has changed. O(clients), and O(1) if it is not here."""
        present = self._present.get(client)
        if present is not None:
            present.weight = self._weights.of(client)
            self._sum_weights()
            self._sum_running_weights()

    # ---- the decisions

    def may_prefill(self, job: Job) -> bool:
        behind = self._behind
        return not behind or job.system or (len(behind) == 1 and job.client in behind)

    def forced(self) -> None:
        self._counts_from = self._steps + self._unseen + 1

    def put_off(self) -> None:
        self.held += 1

    def set_aside(self, clients: int = 1) -> None:
        self.held_back += clients

    def holds_back(self, job: Job) -> bool:
        """O(1), and O(clients that run) if the target follows from the shares and tokens take long."""
        if self.target_s == 0 or not self._is_above(job.client):
            return False
        expected_s = self.expected_s(self._running + 1)
        if self.target_s is not None:
            return expected_s > self.target_s
        return expected_s > self._tokens.solo_s and expected_s > self._longest_s()

    def expected_s(self, requests: int) -> float:
        """How long a token is expected to take beside so many requests; 0 before any was measured."""
        return self._tokens.expected_s(requests)

    def chunk_tokens(self) -> int:
        self._forget_old()
        if (len(self._present) < 2 and not self._left) or (self.mixes and not self._light):
            return ALONE * int(self._chunks.tokens)
        if self._mixed_s():
            return int(min(self._chunks.tokens, self._paced.tokens))
        return int(self._chunks.tokens)

    def whole_tokens(self) -> int:
        return int(self._chunks.tokens) if self._mixed_s() else ALONE * int(self._chunks.tokens)

    # ---- what was done

    def step(
        self,
        duration_s: float,
        extended: Mapping[str, int] | None = None,
        *,
        decoded: int = 0,
        requests: int = 0,
    ) -> None:
        """A step is over, or as many decode steps as `decoded`, for `requests` each (0: not to be measured); they took
        `duration_s` together.

        `extended` has the prompt tokens that it computed, by client; the server's own are `SYSTEM`'s. `computed` comes
        before this for the prompts that it completed, so that they do not count as having been held up. O(clients with
        a lag) for a decode step, O(clients that decode) for another.
        """
        duration_s = min(max(duration_s, 0.0), LONGEST_STEP_S * max(decoded, 1))
        if extended:
            self._prefilled(duration_s, extended, mixed=decoded > 0)
        elif decoded:
            self._decoded(duration_s, decoded)
            if requests:
                self._tokens.measure(duration_s, decoded, requests)
        self._steps += 1

    def _decoded(self, duration_s: float, steps: int) -> None:
        self._decode_s += (duration_s / steps - self._decode_s) * (0.1 if self._decode_s else 1)
        self._tokens.gave(self._decoding_requests, duration_s, steps)
        if self._lagging:
            for client, present in list(self._lagging.items()):
                if present.joined != self._steps:
                    present.lag_s = max(0.0, present.lag_s - duration_s * (1 - self._share(present)))
                    self._sort(client, present)

    def _prefilled(self, duration_s: float, extended: Mapping[str, int], *, mixed: bool) -> None:
        tokens = sum(extended.values())
        if not tokens:
            return
        # Where two decode steps take longer than `stall_s`, shorter chunks would help no client.
        self._chunks.learn(tokens, duration_s, max(self.stall_s, 2 * self._decode_s))
        if mixed and (most_s := self._mixed_s()):
            self._paced.learn(tokens, duration_s, most_s)
        token_s = min(duration_s, self._decode_s)
        duration_s *= 1 - extended.get(SYSTEM, 0) / tokens
        tokens -= extended.get(SYSTEM, 0)
        above = sum(extended[client] for client in extended if client != SYSTEM and self._is_above(client))
        decoded_s = min(duration_s, self._decode_s) if mixed else 0.0
        self._tokens.between_s += (duration_s - decoded_s) * above / max(1, tokens)
        if mixed:
            self._tokens.gave(self._decoding_requests, token_s, 1)
        if self._steps < self._counts_from:
            return
        for client, present in self._decoding.items():
            if present.joined == self._steps or (mixed and present.backlogged):
                continue
            due_s = duration_s * self._share(present)
            served_s = decoded_s
            if client in extended:
                served_s += (duration_s - decoded_s) * extended[client] / max(1, tokens)
            self._largest_growth_s = max(self._largest_growth_s, due_s)
            present.lag_s = max(0.0, present.lag_s + due_s - served_s)
            self.largest_lag_s = max(self.largest_lag_s, present.lag_s)
            self._sort(client, present)

    # ---- what is read

    @property
    def bound_s(self) -> float:
        """No lag has been larger; see the module."""
        return self.patience_s + (1 + self._unseen) * self._largest_growth_s

    def lag_s(self, client: str) -> float:
        """The lag of a client that is here, or was lately; else 0."""
        present = self._present.get(client) or self._left.get(client, (0.0, None))[1]
        return 0.0 if present is None else present.lag_s

    def status(self) -> Mapping[str, Any]:
        """JSON-ready."""
        return {
            "stall_ms": round(1000 * self.stall_s, 3),
            "steps": self._steps,
            "held": self.held,
            "target_tpot_ms": None if self.target_s is None else round(1000 * self.target_s, 3),
            "solo_s": self._tokens.solo_s,
            "held_back": self.held_back,
            "token_s": self._tokens.recent[1],
            "chunk_tokens": int(self._chunks.tokens),
            "largest_lag_s": self.largest_lag_s,
            "bound_s": self.bound_s,
        }

    # ---- inside

    def _sum_weights(self) -> None:
        self._weight = sum((present.weight for present in self._present.values()), 0.0)

    def _sum_running_weights(self) -> None:
        self._running_weight = sum((present.weight for present in self._runners.values()), 0.0)

    def _is_above(self, client: str) -> bool:
        """It has more of the requests that run than its share of them."""
        present = self._present.get(client)
        if present is None or not present.running:
            return False
        fair = self._running * present.weight / self._running_weight
        return present.running > fair * (1 + ROUNDING)

    def _longest_s(self) -> float:
        """How long a token may take, if the target follows from the shares: as long as the heaviest client below its
        share would need for one alone, with its share of the engine."""
        if not self._tokens.solo_s:
            return inf
        below = max((p.weight for c, p in self._runners.items() if not self._is_above(c)), default=0.0)
        return self._tokens.solo_s * self._weight / below if below else inf

    def _mixed_s(self) -> float:
        """The longest mixed step that the clients that decode pay for, apart from those that are backlogged and the
        one with the most of the requests that run; 0: no other decodes, or there are no mixed steps. O(clients that
        run)."""
        if not self.mixes or len(self._runners) < 2 or not self._decoding:
            return 0.0
        heaviest = max(self._runners.values(), key=lambda one: one.running / one.weight)
        light = (one for one in self._decoding.values() if one is not heaviest and not one.backlogged)
        share = max(map(self._share, light), default=0.0)
        usual_s = self._tokens.usual_s(self._decoding_requests) or self._decode_s
        return MIXED * usual_s / share if share else 0.0

    def _share(self, present: Present) -> float:
        if present.weight >= self._weight:
            return 1.0
        return max(LEAST_SHARE, present.weight / self._weight)

    def _sort(self, client: str, present: Present) -> None:
        if present.lag_s > 0:
            self._lagging[client] = present
        else:
            self._lagging.pop(client, None)
        if present.lag_s > self.patience_s:
            self._behind.add(client)
        else:
            self._behind.discard(client)

    def _forget_old(self) -> None:
        while self._left:
            client, (left_s, present) = next(iter(self._left.items()))
            if left_s > self._now_s - RECENT_S:
                return
            del self._left[client]
            self._light -= not present.backlogged
