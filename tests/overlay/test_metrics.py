"""/metrics of a real replica: its clients' tokens are what SGLang has counted, and who may read it."""

import asyncio
import sys
from collections.abc import Iterator
from random import Random
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sglang_fair.metrics.labels import OTHER
from sglang_fair.metrics.table import of
from tests.support.live import Replica
from tests.support.waiting import wait_until

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def replica() -> Iterator[Replica]:
    with Replica(
        "--policy", "dlpm", "--quantum", "500", "--metrics-clients", "3", "--max-running", "8",
        "--", "--enable-metrics",
    ) as made:  # fmt: skip
        yield made


def samples(replica: Replica) -> dict[tuple[str, ...], float]:
    """Ours by name and labels in the order of their names; SGLang's summed by name."""
    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(replica.metrics()):
        for sample in family.samples:
            if sample.name.startswith("sglang_fair_"):
                key = (sample.name.removeprefix("sglang_fair_"), *sample.labels.values())
                assert key not in found
                found[key] = sample.value
            else:
                found[sample.name,] = found.get((sample.name,), 0.0) + sample.value
    return found


def tokens(found: dict[tuple[str, ...], float], kind: str, client: str | None = None) -> float:
    return sum(
        count
        for (name, *labels), count in found.items()
        if name == "tokens_total" and labels[1] == kind and client in (None, labels[0])
    )


def test_the_clients_tokens_are_sglangs(replica: Replica) -> None:
    """Each token that SGLang counts, once; also for clients that get their label late, and with cached prefixes."""
    random = Random(3)
    before = samples(replica)

    async def ask(at: int) -> None:
        client = random.choice(["a", "b", *(f"invented-{one}" for one in range(20))])
        shared = [5] * 64 if at % 3 else []
        prompt = shared + [random.randint(10, 200) for _ in range(random.randint(1, 60))]
        answer = await replica.ask(client, prompt, random.randint(1, 12))
        assert answer.status == 200

    async def burst(start: int) -> None:
        await asyncio.gather(*(ask(at) for at in range(start, start + 20)))

    for start in range(0, 100, 20):
        asyncio.run(burst(start))
        samples(replica)

    def counted() -> bool:
        found = samples(replica)
        return found["sglang:num_requests_total",] - before.get(("sglang:num_requests_total",), 0) == 100

    wait_until(counted, "SGLang has counted every request")
    found = samples(replica)

    def more(name: str) -> float:
        return found[name,] - before.get((name,), 0.0)

    def ours(kind: str) -> float:
        return tokens(found, kind) - tokens(before, kind)

    assert ours("output") == more("sglang:generation_tokens_total") > 0
    assert ours("extend") + ours("cached") == more("sglang:prompt_tokens_total") > 0
    assert ours("cached") == more("sglang:cached_tokens_total") > 0
    assert tokens(found, "output", OTHER) > 0, "more clients than labels"
    clients = {labels[0] for name, *labels in found if name == "tokens_total"}
    assert 3 + 2 <= len(clients) <= 3 * 4 + 2
    waits = sum(count for (name, *_), count in found.items() if name == "queue_wait_seconds_count")
    admitted = sum(count for (name, *_), count in found.items() if name == "admitted_requests_total")
    assert waits == admitted - found["admitted_requests_total", "(system)"]
    assert found["books_balanced",] == found["scheduler_answers",] == 1
    ends = ("_bucket", "_count", "_sum", "")
    named = {metric.name + end for metric in of("replica") for end in ends}
    ours_named = {name for name, *_ in found if ":" not in name}
    assert {name for name in ours_named if name in named} >= {
        metric.name for metric in of("replica") if metric.kind != "histogram"
    }


@pytest.mark.usefixtures("sglang")
@pytest.mark.parametrize(("said", "status"), [(None, 401), ("Bearer x", 401), ("Bearer the key", 200)])
def test_a_key_that_opens_fair_opens_metrics_and_nothing_else_does(said: str | None, status: int) -> None:
    """SGLang itself shows its numbers to everybody."""
    from sglang_fair.overlay.metrics import Page

    async def no_states() -> list[dict[str, object]]:
        return []

    arguments = SimpleNamespace(api_key="the key", admin_api_key=None, enable_metrics=False)
    manager = SimpleNamespace(server_args=arguments, get_internal_state=no_states)
    answer = asyncio.run(Page(manager).answer(said))
    assert answer.status_code == status
    assert (b"scheduler_answers" in answer.body) == (status == 200)


@pytest.mark.usefixtures("sglang")
def test_a_key_that_all_have_names_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_fair.overlay.identity import carry_client

    def client(api_key: str | None) -> str:
        server = SimpleNamespace(get_serving=lambda: SimpleNamespace(api_key=api_key), health_generate=None)
        monkeypatch.setitem(sys.modules, "sglang.srt.entrypoints.http_server", server)
        obj = SimpleNamespace(sampling_params={})
        headers = {"authorization": "Bearer the key"}
        carry_client(obj, SimpleNamespace(headers=headers, scope={"app": None, "endpoint": "x"}))
        named: str = obj.sampling_params["custom_params"]["fair"]["client"]
        return named

    assert client(None).startswith("key:")
    assert client("the key") == "anonymous"
