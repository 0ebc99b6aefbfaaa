"""Ways in which fair schedulers have been seen to lose tokens, clients or time, each shown not to happen.

They were found by reading a public DLPM against SGLang's own code. On the real engine where it can be.
"""

import asyncio
import random
import sys
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from sglang_fair.core import make_policy
from sglang_fair.core.job import Job
from sglang_fair.core.queue import FairQueue
from tests.overlay.test_charges import prompt
from tests.support.live import Replica
from tests.support.waiting import wait_until


@pytest.mark.engine
@pytest.mark.usefixtures("sglang")
class TestSpeculation:
    """SGLang's requests and its own bookkeeping of accepted runs, with a model that proposes what the test says:
    its speculative workers need kernels that a CPU has not."""

    RUNS = ((1, 4), (3, 2), (4, 4))
    """Tokens that two requests accept in each step."""

    @staticmethod
    def scheduler() -> Any:
        from sglang_fair.overlay.config import Config
        from sglang_fair.overlay.heartbeat import Heartbeat
        from sglang_fair.overlay.replica import ReplicaFairness

        fair = ReplicaFairness(Config(), "fcfs", orders=True, tree_cache=SimpleNamespace(disable=True))
        events = SimpleNamespace(publish_kv_events=lambda: None)
        clock = SimpleNamespace(latest=lambda: 0.0)
        return SimpleNamespace(
            fair=fair, kv_events_publisher=events, heartbeat=Heartbeat([0.0] * 3), clock=clock
        )

    @staticmethod
    def request(rid: str, max_new_tokens: int, stop: int | None = None) -> Any:
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        parameters = SamplingParams(
            max_new_tokens=max_new_tokens,
            stop_token_ids=None if stop is None else [stop],
            custom_params={"fair": {"client": rid}},
        )
        parameters.normalize(None)
        request = Req(rid, "", array("q", range(10)), parameters, vocab_size=1000)
        request.prefix_len, request.extend_end = 0, 10
        return request

    @staticmethod
    def step(scheduler: Any, requests: list[Any], runs: tuple[int, ...], *, decode: bool = True) -> None:
        """What SGLang does with a result, around which the hook counts."""
        import torch

        from sglang_fair.overlay.hooks import process_batch_result

        mode = SimpleNamespace(is_extend=lambda: not decode, is_decode=lambda: decode)
        batch = SimpleNamespace(
            reqs=requests, forward_mode=mode, is_dllm=lambda: False, decoding_reqs=None,
            extend_lens=[len(request.origin_input_ids) for request in requests],
        )  # fmt: skip
        accepted = torch.tensor(runs) if decode else None
        result = SimpleNamespace(accept_lens=accepted, grammar_retained_tokens=None)

        def process(_scheduler: Any, _batch: Any, _result: Any) -> None:
            for request, run in zip(requests, runs, strict=True):
                if not request.finished():
                    start = len(request.output_ids)
                    request.output_ids.extend(range(start, start + run))
                    request.update_finish_state(run)

        process_batch_result(process, scheduler, batch, result)

    def served(self, *requests: Any) -> dict[str, Any]:
        scheduler = self.scheduler()
        fair = scheduler.fair
        for request in requests:
            fair.arrive(request)
        fair.queue.begin_pass()
        for request in requests:
            fair.admitted(request)
        fair.computed(20)
        self.step(scheduler, list(requests), (1, 1), decode=False)
        for runs in self.RUNS:
            self.step(scheduler, list(requests), runs)
        status: dict[str, Any] = fair.status([])
        return status

    def test_4_every_token_of_an_accepted_run_is_charged(self) -> None:
        books = self.served(self.request("a", 100), self.request("b", 100))
        assert books["clients"]["a"]["output_tokens"] == 1 + 1 + 3 + 4
        assert books["clients"]["b"]["output_tokens"] == 1 + 4 + 2 + 4
        assert books["conservation"]["mismatches"] == 0
        assert books["conservation"]["engine_output_tokens"] == 20
        assert books["conservation"]["checks"] == 1 + 1 + len(self.RUNS)

    def test_4_a_run_past_the_end_of_the_answer_is_not_its_clients(self) -> None:
        """a may make 3 tokens and accepts a run up to 5; b stops at its 4th, within a run up to its 5th."""
        books = self.served(self.request("a", 3), self.request("b", 100, stop=3))
        assert books["clients"]["a"]["output_tokens"] == 3
        assert books["clients"]["b"]["output_tokens"] == 4
        assert books["clients"]["(system)"]["output_tokens"] == 2 + 1
        assert books["conservation"]["mismatches"] == 0
        assert books["totals"]["running"] == 0

    def test_4_a_lost_run_is_found(self, caplog: pytest.LogCaptureFixture) -> None:
        """The check's numbers are not those that it checks: a charge that is dropped is a mismatch, logged once."""
        scheduler, request = self.scheduler(), self.request("a", 100)
        fair = scheduler.fair
        fair.arrive(request)
        fair.queue.begin_pass()
        fair.admitted(request)
        fair.computed(10)
        fair.queue.account.emit = lambda job, tokens, unasked_tokens: None
        for _ in range(2):
            self.step(scheduler, [request], (3,))
        found = fair.status([])["conservation"]
        assert not found["ok"]
        assert found["mismatches"] == 2
        assert found["first_mismatch"]["engine_output_tokens"] == 3
        assert [record.levelname for record in caplog.records] == ["ERROR"]
        assert "differ after a result was processed" in caplog.text


def serve(queue: FairQueue) -> Job:
    """Admit the next request and compute its prompt."""
    queue.begin_pass()
    job = queue.next()
    assert job is not None
    queue.admit(job, extend_tokens=job.prompt_tokens, cached_tokens=0)
    queue.finish(job.id)
    return job


@pytest.mark.engine
def test_7_the_order_holds_with_more_than_128_waiting(one_at_a_time: Replica) -> None:
    """Of 150 requests the last 8 have a cached prefix, and go first, once each was looked up: 60 new ones in a pass,
    so two others may go before. SGLang's own LPM gives up above 128."""
    replica = one_at_a_time
    replica.flush()
    hot = [9] * 64
    for number in (1, 2):
        replica.generate("deep", [*hot, *[number] * 48])
    cold = [prompt(random.Random(number), 24) for number in range(142)]
    tokens = [*cold, *([*hot, *[number] * 48] for number in range(10, 18))]

    async def finished_first() -> set[int]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            blocker = asyncio.create_task(
                replica.ask("deep", [5] * 16, 20_000, session=session, rid="d" * 32)
            )
            await asyncio.to_thread(
                wait_until, lambda: replica.fair()["totals"]["running"] == 1, "the blocker"
            )
            asked = []
            for count in (142, 150):  # the cold ones are all here before the hot ones
                asked += [
                    asyncio.create_task(replica.ask("deep", one, session=session))
                    for one in tokens[len(asked) : count]
                ]
                await asyncio.to_thread(
                    wait_until,
                    lambda count=count: replica.fair()["totals"]["waiting"] == count,
                    f"{count} waiting",
                )
            await asyncio.to_thread(replica.abort, "d" * 32)
            answers = await asyncio.gather(*asked)
            await blocker
        return set(sorted(range(150), key=lambda number: answers[number].finished_at)[: 2 + 8])

    assert set(range(142, 150)) <= asyncio.run(finished_first())


@pytest.mark.parametrize("policy", ["dlpm", "vtc", "drr", "lpm", "fcfs"])
def test_8_a_pass_does_not_walk_the_queue(policy: str) -> None:
    """Calls of functions in one pass that admits ten: ten times the queue may add a few steps in a heap."""

    def calls_of_a_pass(waiting: int) -> int:
        queue = FairQueue(make_policy(policy))
        for number in range(waiting):
            job = Job(str(number), f"client{number % 50}", prompt_tokens=10, prefix_tokens=number % 7)
            queue.arrive(job)
        serve(queue)
        return count_calls(lambda: [serve(queue) for _ in range(10)])

    few, many = calls_of_a_pass(300), calls_of_a_pass(3000)
    assert many < 2 * few, (few, many)


def count_calls(work: Callable[[], object]) -> int:
    calls = 0

    def note(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls
