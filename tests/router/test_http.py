"""The router's HTTP server over real sockets: who is alive, who is ready, and numbers that add up."""

import contextlib
import signal
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from router.bounded import listen
from router.core import Router
from router.events import Agent, Arrive, Done, Due, WorkerDrain, WorkerHealth, WorkerUp
from router.http import serve
from router.placement import build
from router.placement.contract import Request
from router.placement.round_robin import RoundRobin
from router.radix import Match
from router.record import placement_reason
from router.wire import pack_tokens
from router.workers import Pool, Worker
from sglang_fair.metrics.table import PLAN_OUTCOMES, REASONS, of
from tests.router.test_shell import Wire
from tests.support.ports import free_port
from tests.support.site import Process
from tests.support.waiting import wait_until


def get(url: str) -> httpx.Response:
    return httpx.get(url, timeout=120)


@contextlib.contextmanager
def site(*, placement: str = "d2lpm") -> Iterator[tuple[Wire, str]]:
    wire = Wire(Router(build(placement), name=placement, page_size=4, linger_s=0.0))
    listener = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        wire.jobs.append(serve(listener, wire.shell))
        wire.start()
        yield wire, url
    finally:
        wire.close()


def test_another_site_s_page_is_told_nothing() -> None:
    with site() as (_, url):
        for headers in (
            {"host": "evil.example"},
            {"origin": "http://evil.example"},
            {"sec-fetch-site": "cross-site"},
        ):
            assert httpx.get(f"{url}/metrics", headers=headers, timeout=120).status_code == 403


def numbers(url: str) -> dict[tuple[str, ...], float]:
    """Each sample, by name and the values of its labels, which stand in the order of their names."""
    answer = get(f"{url}/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name.removeprefix("sglang_fair_router_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


@pytest.mark.slow
def test_from_sigterm_on_it_is_not_ready() -> None:
    """It goes on placing until a second one, or until the notice is over."""
    port = free_port()
    worker = "--worker=r0,http=http://127.0.0.1:9"
    asked = ("--bind", f"tcp://127.0.0.1:{free_port()}", "--http-port", str(port), worker, "--notice", "3600")
    router = Process("router", "router", *asked)
    router.start()
    url = f"http://127.0.0.1:{port}"

    def says(status: int, path: str = "readyz") -> bool:
        with contextlib.suppress(httpx.TransportError):
            return get(f"{url}/{path}").status_code == status
        return False

    try:
        wait_until(lambda: says(200), "ready")
        router.send(signal.SIGTERM)
        wait_until(lambda: says(503), "not ready")
        wait_until(lambda: says(200, "healthz"), "healthy")
        router.send(signal.SIGTERM)
        wait_until(lambda: router.exit_code() is not None, "its end")
        assert router.exit_code() == 0
    finally:
        router.close()


@pytest.mark.slow
def test_ready_while_somebody_takes_requests() -> None:
    with site() as (wire, url):
        assert get(f"{url}/healthz").json() == {"status": "ok"}
        assert get(f"{url}/readyz").status_code == 503
        wire.peer.tell(WorkerUp("r0", "http://r0"))
        wire.peer.tell(WorkerUp("r1", "http://r1"))
        wait_until(lambda: get(f"{url}/readyz").status_code == 200, "ready")
        wire.peer.ask(Arrive("q", "c", pack_tokens([1, 2, 3, 4]), exclude=("r1",)))
        wire.peer.tell(WorkerDrain("r0"))
        assert get(f"{url}/readyz").status_code == 200
        wire.peer.tell(WorkerHealth("r1", ok=False))
        wait_until(lambda: get(f"{url}/readyz").status_code == 503, "nobody is left")
        found = numbers(url)
        assert [found["workers", state] for state in ("up", "draining", "sick")] == [0, 1, 1]
        assert get(f"{url}/healthz").status_code == 200
        assert get(f"{url}/nothing").status_code == 404
        assert httpx.post(f"{url}/metrics", timeout=120).status_code == 405


def test_numbers() -> None:
    with site() as (wire, url):
        wire.peer.tell(WorkerUp("r0", "http://r0"))
        tokens = pack_tokens(list(range(40)))
        wire.peer.ask(Arrive("1", "c", tokens))
        wire.peer.tell(Done("1", output_tokens=5, cached_tokens=0))
        wire.peer.tell(WorkerUp("r1", "http://r1"))
        wire.peer.ask(Arrive("2", "c", tokens, max_output_tokens=10))
        wire.peer.ask(Arrive("3", "c", tokens, exclude=("r0", "r1")))
        wire.peer.ask(Agent("4", "r1", "", swap_s={"a": 1.0, "b": 1.0}))
        found = numbers(url)
        placed = {
            (worker, reason): found["placements_total", reason, worker]
            for worker in ("r0", "r1")
            for reason in REASONS
        }
        assert sum(placed.values()) == 2
        assert placed["r0", "only"] == 1
        assert (found["ended_total", "ok"], found["refusals_total",]) == (1, 1)
        assert found["prompt_tokens_total",] == 80
        assert (found["measured_prompt_tokens_total",], found["measured_hit_tokens_total",]) == (40, 0)
        assert sum(found["requests_in_flight", worker] for worker in ("r0", "r1")) == 1
        names = {metric.name.removeprefix("router_") for metric in of("router")}
        assert {name for name, *_ in found} == {name for name in names if not name.startswith(QUEUES)}


QUEUES = ("queue_", "plan_", "plans_", "planned_", "replicas_short", "wait_r2")


def test_numbers_of_queues_that_are_planned() -> None:
    with site(placement="qlm") as (wire, url):
        names = {metric.name.removeprefix("router_") for metric in of("router")}
        wire.peer.tell(WorkerUp("r0", "http://r0", models=("a",), loaded="a", kv_tokens=100, chunk_tokens=1))
        wire.peer.ask(Agent("4", "r0", "a", swap_s={"a": 1.0}))
        tokens = pack_tokens(list(range(90)))
        due = Due("interactive", 20.0, 20.0)
        gateway = wire.new_peer()
        for number in range(6):
            gateway.tell(Arrive(str(number), "c", tokens, 10, due=due))
        wait_until(lambda: wire.peer.state()["counts"].get("arrived") == 6, "all have come")
        held = wire.peer.state()["waiting"]
        assert held
        found = numbers(url)
        waiting = {key: value for key, value in found.items() if key[0] == "queue_requests"}
        assert sum(waiting.values()) == held
        assert {key[2] for key in waiting} == {"interactive"}
        assert {name for name, *_ in found} == names - {"wait_r2"}  # of which too few are known yet
        assert found["plans_asked_total",] == 0
        assert {found["plans_total", outcome] for outcome in PLAN_OUTCOMES} == {0}


def test_why_a_replica_was_chosen() -> None:
    pool = Pool("", RoundRobin())
    workers = [Worker(WorkerUp(name, ""), pool) for name in ("r0", "r1", "r2")]
    request = Request("q", "c", b"", 0, 0, 0.0)
    match = Match(8, ("r0", "r1"), {"r0": 8, "r1": 8, "r2": 4})

    def reason(at: int, match: Match = match, allowed: list[Worker] = workers, **more: object) -> str:
        asked = Request("q", "c", b"", 0, 0, 0.0, **more) if more else request
        return placement_reason(asked, workers[at], match, allowed)

    assert [reason(at) for at in range(3)] == ["prefix", "prefix", "load"]
    assert reason(0, Match()) == "new"
    assert reason(2, Match(8, ("r9",), {"r9": 8})) == "new", "who has it takes nothing"
    assert reason(2, allowed=workers[2:]) == "only"
    assert reason(2, exclude=("r9",)) == "retry"
