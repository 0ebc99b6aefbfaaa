"""A replica's counters by client: their sum is the ledger's at every reading, and none of them ever falls."""

from math import log2
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from sglang_fair.core import make_policy
from sglang_fair.core.job import Job
from sglang_fair.core.ledger import SYSTEM, Ledger
from sglang_fair.core.queue import FairQueue
from sglang_fair.metrics import exposition
from sglang_fair.metrics.labels import OTHER
from sglang_fair.metrics.replica import COUNTS, ReplicaCounts
from sglang_fair.metrics.table import BY_NAME, SECONDS, Histogram
from sglang_fair.overlay.metrics import client_rows, waiting_of


class Site:
    """A queue whose requests come and go at random, and what its counters said at the last reading."""

    def __init__(self, seed: int, names: int, most: int, max_accounts: int) -> None:
        self.random, self.names = Random(seed), names
        self.queue = FairQueue(make_policy("dlpm", quantum=100))
        self.queue.account.ledger = Ledger(max_clients=max_accounts)
        self.counts = ReplicaCounts(most)
        self.number = 0
        self.before: dict[tuple[str, str], float] = {}

    def step(self) -> None:
        random, queue = self.random, self.queue
        what = random.choice(
            ["come", "come", "admit", "admit", "emit", "emit", "emit", "end", "leave", "retract"]
        )
        running = list(queue.running())
        if what == "come":
            self.number += 1
            system, tenant = random.random() < 0.05, random.random() < 0.1
            job = Job(
                str(self.number), f"c{int(self.names * random.random() ** 2)}", prompt_tokens=random.randint(1, 300),
                max_output_tokens=50, system=system, weight=random.choice([1.0, 3.0]) if tenant else None,
                weight_version=self.number,
            )  # fmt: skip
            self.counts.arrived(job, queue)
            queue.arrive(job)
        elif what == "admit":
            queue.begin_pass()
            if (job := queue.next()) is not None:
                cached = random.randint(0, job.prompt_tokens - 1)
                if not job.retractions:
                    self.counts.admitted(job, random.random() * 400)
                queue.admit(job, extend_tokens=job.prompt_tokens - cached, cached_tokens=cached)
        elif what == "emit" and running:
            queue.account.emit(random.choice(running), random.randint(1, 60))
        elif what == "end" and running:
            queue.finish(random.choice(running).id)
        elif what == "leave" and (waiting := list(queue.jobs())):
            queue.leave(random.choice(waiting).id)
        elif what == "retract" and running:
            queue.retract(random.choice(running))

    def read(self) -> dict:
        found, total = self.counts.read(self.queue), self.queue.account.ledger.total
        clients = found["clients"]
        for name in COUNTS:
            assert sum(one[name] for one in clients.values()) == getattr(total, name), name
        assert sum(one["service"] for one in clients.values()) == pytest.approx(total.service)
        assert sum(one.get("waiting", 0) for one in clients.values()) <= len(self.queue)
        now = {(client, name): one[name] for client, one in clients.items() for name in (*COUNTS, "service")}
        for key, count in self.before.items():
            assert now[key] >= count, f"{key} falls"
        assert all(count >= 0 for count in now.values())
        self.before = now
        return found


@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(0, 4), st.sampled_from([8, 1000]))
def test_sums_are_the_ledgers_and_nothing_falls(seed: int, names: int, most: int, max_accounts: int) -> None:
    """Also where the ledger drops accounts, and where a client gets its label late."""
    site = Site(seed, names, most, max_accounts + names)
    for _ in range(6):
        for _ in range(40):
            site.step()
        site.read()


@pytest.mark.slow
def test_ten_thousand_invented_names_and_one_that_stays() -> None:
    """They come before it, one request each, and fill the ledger: it has its label, and few of them have."""
    queue, counts, largest = FairQueue(make_policy("dlpm")), ReplicaCounts(20), 0.0
    queue.account.ledger = Ledger(max_clients=500)

    def serve(client: str, tokens: int) -> None:
        job = Job(f"{client}-{tokens}", client, prompt_tokens=tokens, max_output_tokens=1)
        counts.arrived(job, queue)
        queue.arrive(job)
        queue.admit(job, extend_tokens=tokens, cached_tokens=0)
        queue.finish(job.id)

    for number in range(10_000):
        serve(f"invented-{number}", 100 + number % 50)
        largest = max(largest, 149.0)
        if number % 100 == 99:
            counts.read(queue)
    labels = set(counts.read(queue)["clients"]) - {OTHER, SYSTEM}
    assert 20 <= len(labels) <= 20 * (1 + log2(largest))
    serve("real", 400)
    found = counts.read(queue)["clients"]
    assert found["real"]["extend_tokens"] == 0, "what it had before it had a label stays with the others"
    serve("real", 300)
    for number in range(1000):
        serve(f"more-{number}", 100)
    found = counts.read(queue)["clients"]
    assert found["real"]["extend_tokens"] == 300, "its account is kept, however many come"
    total = queue.account.ledger.total
    assert sum(one["extend_tokens"] for one in found.values()) == total.extend_tokens


def test_the_ledger_keeps_who_is_to_be_kept() -> None:
    ledger = Ledger(max_clients=10)
    ledger.record("kept", extend=5)
    ledger.keep("kept")
    for number in range(1000):
        ledger.record(f"c{number}", extend=1)
    assert ledger.usage("kept").extend_tokens == 5
    assert len(ledger.accounts()) <= 11
    assert sum(one.extend_tokens for one in ledger.accounts().values()) == ledger.total.extend_tokens == 1005


def test_the_page_can_be_read_and_has_no_row_twice() -> None:
    site = Site(5, 30, 3, 1000)
    for _ in range(300):
        site.step()
    found = site.read()
    page = exposition.text(client_rows(found)).decode()
    seen = set()
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in seen
            seen.add(key)
    metric = BY_NAME["queue_wait_seconds"].full_name
    waits = [one for one in seen if one[0] == f"{metric}_bucket" and dict(one[1])["client"] == OTHER]
    assert len(waits) == len(SECONDS) + 1
    for client in waiting_of(found).values():
        assert client.service >= 0


def test_a_histogram_is_cumulative() -> None:
    waits = Histogram()
    for seconds in (0.0, 0.01, 0.011, 299, 301):
        waits.observe(seconds)
    page = exposition.text([("queue_wait_seconds", ("a",), waits.plain())]).decode()
    found = {
        sample.labels.get("le", sample.name[-3:]): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }
    assert (found["0.01"], found["0.03"], found["300.0"], found["+Inf"]) == (2, 3, 4, 5)
    assert (found["unt"], found["sum"]) == (5, pytest.approx(600.021))
