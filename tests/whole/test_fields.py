"""No value of any field ends a replica, whether a gateway or it is asked itself, and no other client notices."""

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.support.budget import examples, seeds
from tests.support.live import Cluster
from tests.support.odd_bodies import Odd, bodies

pytestmark = pytest.mark.e2e

PATIENCE_S = 30.0
"""An odd body may ask for a long answer: who asked leaves then."""
ASKING = 8
STEADY = {"prompt": "as always", "max_tokens": 3, "temperature": 0}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as made:
        yield made


@pytest.mark.parametrize("seed", seeds(1))
@pytest.mark.parametrize("directly", [False, True], ids=["gateway", "replica"])
def test_no_value_of_a_field_ends_a_replica(cluster: Cluster, directly: bool, seed: int) -> None:
    before = {process.pid for process in cluster.processes()}
    over, served = threading.Event(), Counter[int]()
    url = cluster.addresses["replicas"][0] if directly else cluster.url
    with httpx.Client(base_url=cluster.url, headers={"x-fair-client": "steady"}, timeout=120) as steady:

        def goes_on() -> None:
            while not over.is_set():
                answer = steady.post("/v1/completions", json=STEADY)
                served[answer.status_code] += 1

        def ask(odd: Odd) -> tuple[Odd, object]:
            try:
                headers = {"content-type": "application/json", "x-fair-client": "odd"}
                answer = httpx.post(url + odd.route, content=odd.body, headers=headers, timeout=PATIENCE_S)
            except httpx.ReadTimeout:
                return odd, "left"
            return odd, answer.status_code

        with ThreadPoolExecutor(ASKING + 1) as threads:
            going = threads.submit(goes_on)
            try:
                answers = list(threads.map(ask, bodies(seed, examples(1500))))
            finally:
                over.set()
            going.result()
    counts = Counter(status for _, status in answers)
    print(dict(counts), dict(served))
    faults = [
        (odd.route, odd.field, odd.odd, status)
        for odd, status in answers
        if isinstance(status, int) and status >= 500 and status != 503
    ]
    assert {process.pid for process in cluster.processes()} == before
    assert set(served) == {200}
    assert directly or not faults, faults
