"""SGLang's own event loops, normal or overlapped, with a model that takes no time and a clock that we move.

    python -m tests.support.loops normal|overlap SEED CASES [POLICY…]

serves random cases one after the other and prints the sum of what came of them as JSON. The scheduler has to be alone
in its process. All that is random follows from the seed: the sizes of pool, pages, chunks and batches; who sends what,
and when; which requests are aborted while they wait, are cut, decode, were retracted, or have ended; pauses that
retract all. Of each case is checked, in `Case.check`, that every request ended once, that the charges of each client
are what the model computed and gave, that nobody who runs was behind by more than the bound, that the pools are whole,
and that the books are empty; and in every iteration that the books have those who wait, that each load report is
SGLang's own sum over them, and that a batch leaves the queue as SGLang's own filter would.
"""

import json
import os
import sys
from array import array
from collections import Counter
from dataclasses import replace
from http import HTTPStatus
from random import Random
from types import SimpleNamespace
from typing import Any

from sglang_fair.core import POLICIES
from sglang_fair.core.ledger import SYSTEM
from sglang_fair.engines import cpu
from sglang_fair.overlay.config import server_name

LOOPS = ("normal", "overlap")
STEP_S, TOKEN_S, ROW_S = 0.004, 0.00005, 0.0002
IDLE_S = 0.5
"""An idle scheduler sleeps so long, unless somebody comes."""
MOST_ITERATIONS = 20_000
CLIENTS = "abcdef"
END = 7
"""The token with which an answer ends that does not ignore it."""


class Died(AssertionError):
    """What a case is not to come to."""


class Loop:
    """One scheduler, built for a random pool, and its senders."""

    def __init__(self, loop: str, seed: int) -> None:
        if loop == "overlap":
            words = (word for word in cpu.SERVER_ARGUMENTS if word != "--disable-overlap-schedule")
            cpu.SERVER_ARGUMENTS = tuple(words)
        os.environ.update(cpu.environment())
        from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer

        from sglang_fair.engines.bench.one_process import Engine

        random = Random(f"{loop} {seed}")
        streams = SchedulerOutputStreamer.stream_output
        page = random.choice([1, 16, 16, 32])
        self.pool_tokens = random.choice([320, 640, 1280, 4096])
        engine = Engine(
            random.choice([2, 1000]), seed, policy=random.choice(["fcfs", "dlpm"]), pool_tokens=self.pool_tokens,
            arguments=(
                "--page-size", str(page), "--max-running-requests", str(random.choice([2, 5, 16])),
                "--chunked-prefill-size", "128", "--enable-mixed-chunk",
            ),
        )  # fmt: skip
        SchedulerOutputStreamer.stream_output = streams
        self.scheduler = scheduler = engine._scheduler
        scheduler._get_new_batch_prefill_raw = self.form  # in place of what takes the time of each step
        self.random, self.now_s, self.page = random, 0.0, page
        self.case: Case | None = None
        scheduler.tp_worker.forward_batch_generation = self.forward
        sender = SimpleNamespace(send_output=self.hear)
        scheduler.output_streamer.send_to_detokenizer = sender
        object.__setattr__(scheduler.ipc_channels, "send_to_tokenizer", sender)
        sleeper = SimpleNamespace(poller=SimpleNamespace(poll=self.sleep), maybe_sleep=self.sleep)
        scheduler.idle_sleeper = sleeper
        scheduler.process_input_requests = self.process
        scheduler.request_receiver = SimpleNamespace(recv_requests=self.receive)

    def serve(self, policy: str, requests: int) -> "Case":
        """One case, to its end."""
        random, scheduler = self.random, self.scheduler
        options = {"rpm": "limit=600"}.get(policy, "")
        os.environ["SGLANG_FAIR_STALL_MS"] = random.choice(["0", "5", "100", "100"])
        target = random.choice(["", "0", "5"]) if os.environ["SGLANG_FAIR_STALL_MS"] != "0" else ""
        os.environ["SGLANG_FAIR_TARGET_TPOT_MS"] = target
        os.environ["SGLANG_FAIR_OPTIONS"] = options
        assert scheduler.flush_cache(empty_cache=False)
        scheduler.schedule_policy = server_name(policy)
        scheduler.init_schedule_policy()
        from sglang_fair.overlay.clock import Clock

        scheduler.clock = Clock(is_shared=False, read=lambda: self.now_s)
        scheduler.chunked_prefill_size = random.choice([None, 32, 64, 128])
        scheduler.is_mixed_chunk = scheduler.chunked_prefill_size is not None and random.random() < 0.3
        scheduler.new_token_ratio_tracker.init = random.choice([0.05, 0.3, 0.7])
        scheduler.new_token_ratio_tracker.reset()
        scheduler.gracefully_exit = False
        self.case = case = Case(self, policy, requests)
        try:
            scheduler.run_event_loop()
            case.check()
        except Exception as error:
            raise Died(f"{case} {type(error).__name__}: {error}") from error
        return case

    # ---- what stands around the scheduler

    def receive(self, local_reqs: list[Any] | None = None) -> list[Any]:
        assert self.case is not None
        return [*(local_reqs or ()), *self.case.sends()]

    def process(self, received: list[Any]) -> None:
        assert self.case is not None
        type(self.scheduler).process_input_requests(self.scheduler, received)
        self.case.follow()

    def form(self, *args: Any, **kwargs: Any) -> Any:
        from sglang.srt.managers.scheduler_components.metrics_reporter import PrefillStats

        case, scheduler, counts = self.case, self.scheduler, vars(PrefillStats)["from_adder"]
        assert case is not None
        queue, before = scheduler.waiting_queue, list(scheduler.waiting_queue)

        def counted(cls: Any, /, adder: Any, *args: Any, num_pending_tokens: int, **kwargs: Any) -> Any:
            cut = scheduler.chunked_req
            left = [one for one in before if one not in adder.can_run_list]
            rest = 0 if cut is None else cut.seqlen - cut.prefix_len - cut.extend_len
            if num_pending_tokens != (pending := sum(one.seqlen for one in left) + rest):
                raise Died(f"{num_pending_tokens} tokens are said to wait behind a batch, and {pending} do")
            return counts.__func__(cls, adder, *args, num_pending_tokens=num_pending_tokens, **kwargs)

        PrefillStats.from_adder = classmethod(counted)
        try:
            batch, running = type(scheduler)._get_new_batch_prefill_raw(scheduler, *args, **kwargs)
        finally:
            PrefillStats.from_adder = counts
        admitted = () if batch is None else batch.reqs
        left = [one for one in before if one not in admitted]
        if scheduler.waiting_queue[: len(left)] != left:
            raise Died(f"{scheduler.waiting_queue} wait behind a batch, and not first {left}")
        if any(not one.retraction_count for one in scheduler.waiting_queue[len(left) :]):
            raise Died("a request that was not taken back waits behind a batch, and did not before it")
        case.walks += scheduler.waiting_queue is not queue
        case.compare_loads()
        return batch, running

    def sleep(self, *_: Any) -> None:
        self.now_s += IDLE_S

    def hear(self, output: Any, request: Any = None) -> None:
        assert self.case is not None
        reasons = getattr(output, "finished_reasons", None)
        for at, rid in enumerate(getattr(output, "rids", None) or ()):
            if reasons is not None and reasons[at] is not None:
                self.case.ended[rid] += 1
        if request is not None and type(output).__name__ == "AbortReq":
            self.case.ended[output.rid] += 1
            if (output.finished_reason or {}).get("status_code") == HTTPStatus.INTERNAL_SERVER_ERROR:
                raise Died(f"{output.rid} ended by {output.finished_reason}")

    def forward(self, batch: Any, *_: Any, **__: Any) -> Any:
        import torch
        from sglang.srt.managers.utils import GenerationBatchResult

        case = self.case
        assert case is not None
        extend = batch.extend_num_tokens if batch.forward_mode.is_extend() else 0
        case.extended += extend - len(batch.decoding_reqs or ()) if extend else 0
        case.steps[batch.forward_mode.name] += 1
        self.now_s += STEP_S + extend * TOKEN_S + len(batch.reqs) * ROW_S
        drawn = [END if self.random.random() < 0.1 else 9 for _ in batch.reqs]
        tokens = torch.tensor(drawn, dtype=torch.int64)
        return GenerationBatchResult(logits_output=None, next_token_ids=tokens, can_run_cuda_graph=False)


class Case:
    """The senders of one case, and what they saw."""

    def __init__(self, loop: Loop, policy: str, requests: int) -> None:
        self.loop, self.policy, self.left = loop, policy, requests
        self.scheduler = loop.scheduler
        self.random = loop.random
        self.ended: Counter[str] = Counter()
        self.steps: Counter[str] = Counter()
        self.aborted: Counter[str] = Counter()
        self.extended = 0
        self.sent: list[str] = []
        self.requests: dict[str, Any] = {}
        """SGLang's, of those that joined its queue."""
        self.iterations = 0
        self.walks = 0
        """How often SGLang had to walk over the queue, for a report or to leave out what it admitted."""
        self.rests = 0
        self.burst = self.random.choice([1, 3, 12, 40])
        self.pace = self.random.choice([0.02, 0.2, 0.6])
        self.aborts = self.random.choice([0.0, 0.05, 0.3])
        self.pauses = self.random.choice([0.0, 0.0, 0.01])
        self.heads = [[self.random.randrange(20, 200) for _ in range(400)] for _ in range(3)]

    def __str__(self) -> str:
        scheduler = self.scheduler
        return (
            f"policy {self.policy}, chunks {scheduler.chunked_prefill_size}, mixed {scheduler.is_mixed_chunk}, "
            f"stall {os.environ['SGLANG_FAIR_STALL_MS']}, pool {self.loop.pool_tokens} of {self.loop.page}, "
            f"sent {len(self.sent)}, iteration {self.iterations}:"
        )

    def state(self) -> dict[str, Any]:
        scheduler = self.scheduler
        return {
            "waiting": [scheduler.fair.explain(one.rid, None) for one in scheduler.waiting_queue[:2]],
            "running": [one.rid for one in scheduler.running_batch.reqs],
            "cut": None if scheduler.chunked_req is None else scheduler.chunked_req.rid,
            "free": scheduler.token_to_kv_pool_allocator.available_size(),
            "evictable": scheduler.tree_cache.evictable_size(),
            "steps": dict(self.steps),
        }

    # ---- what is sent

    def sends(self) -> list[Any]:
        """An iteration begins."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

        self.iterations += 1
        if self.iterations > MOST_ITERATIONS:
            raise Died(
                f"stuck: {[rid for rid in self.sent if not self.ended[rid]]} did not end; {self.state()}"
            )
        random, scheduler = self.random, self.scheduler
        if scheduler._engine_paused:
            return [ContinueGenerationReqInput()]
        inputs: list[Any] = []
        idle = scheduler.is_fully_idle()
        if self.left and (idle or random.random() < self.pace):
            number = min(self.left, random.randint(1, self.burst))
            self.left -= number
            inputs += [self.request() for _ in range(number)]
        if random.random() < self.aborts and (abort := self.abort()) is not None:
            inputs.append(abort)
            random.shuffle(inputs)
        if self.pauses and random.random() < self.pauses:
            inputs.append(PauseGenerationReqInput(mode=random.choice(["in_place", "retract"])))
        self.rests = self.rests + 1 if idle and not inputs and not self.left else 0
        scheduler.gracefully_exit = self.rests > 3
        return inputs

    def request(self) -> Any:
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        random, pool = self.random, self.loop.pool_tokens
        rid = f"r{len(self.sent)}."
        self.sent.append(rid)
        longest = random.choice([8, 40, pool // 4, pool // 2, pool])
        head = random.choice(self.heads)[: random.choice([0, 0, 40, 200])]
        tail = [random.randrange(20, 200) for _ in range(random.randint(1, longest))]
        carried: dict[str, Any] = {"client": random.choice(CLIENTS)}
        if random.random() < 0.3:
            carried |= {"slack_s": random.choice([0.05, 0.5, 5.0]), "tier": random.randrange(2)}
        if random.random() < 0.2:
            carried["expected_output_tokens"] = random.randint(1, 60)
        if random.random() < 0.05:
            carried["system"] = True
        parameters = SamplingParams(
            max_new_tokens=random.choice([1, 2, 8, 40, 120]),
            temperature=0,
            ignore_eos=random.random() < 0.3,
            stop_token_ids=[END],
            custom_params={"fair": carried},
        )
        parameters.normalize(None)
        return TokenizedGenerateReqInput(
            rid=rid, input_text="", input_ids=array("q", head + tail), input_embeds=None, mm_inputs=None,
            token_type_ids=None, sampling_params=parameters, return_logprob=False, logprob_start_len=-1,
            top_logprobs_num=0, token_ids_logprob=None, stream=random.random() < 0.5,
        )  # fmt: skip

    def abort(self) -> Any:
        """Of one in some phase, if there is one; seldom of all."""
        from sglang.srt.managers.io_struct import AbortReq

        scheduler, random = self.scheduler, self.random
        if random.random() < 0.02:
            self.aborted["all"] += 1
            return AbortReq(rid="", abort_all=True)
        last = scheduler.last_batch.reqs if scheduler.last_batch is not None else []
        phases = {
            "waits": [one for one in scheduler.waiting_queue if not one.output_ids],
            "retracted": [one for one in scheduler.waiting_queue if one.output_ids],
            "cut": [] if scheduler.chunked_req is None else [scheduler.chunked_req],
            "decodes": list(scheduler.running_batch.reqs),
            "under way": list(last),
        }
        phase = random.choice([*phases, "over"])
        if phase == "over":
            rids = [rid for rid in self.sent[-20:] if self.ended[rid]]
        else:
            rids = [one.rid for one in phases[phase]]
        if not rids:
            return None
        self.aborted[phase] += 1
        return AbortReq(rid=random.choice(rids))

    # ---- what came of it

    def follow(self) -> None:
        """The inputs of an iteration are processed: the books have those who wait, and no others; and there is room for
        the rest of the prompt that was cut."""
        from sglang_fair.overlay import room

        scheduler = self.scheduler
        for one in scheduler.waiting_queue:
            self.requests.setdefault(one.rid, one)
        books = {job.id for job in scheduler.fair.queue.jobs()}
        if books != (there := {one.rid for one in scheduler.waiting_queue}):
            raise Died(f"the books have {sorted(books - there)} waiting, and {sorted(there - books)} not")
        free = room.free_tokens(scheduler.token_to_kv_pool_allocator, scheduler.tree_cache)
        if (rest := room.rest_of(scheduler.chunked_req, self.loop.page)) > free:
            raise Died(f"{scheduler.chunked_req.rid} was cut, and its rest of {rest} has room for {free}")
        self.compare_loads()

    def compare_loads(self) -> None:
        """What SGLang reports is what it would by the queue itself."""
        scheduler = self.scheduler
        ours, waiting = scheduler.load_inquirer, scheduler.waiting_queue
        stock = replace(ours, get_waiting_queue=lambda: waiting)
        self.walks += ours.get_waiting_queue() is waiting
        told, true = (
            (
                one._get_num_pending_tokens(),
                one.get_num_waiting_uncached_tokens(),
                *without_time(one.get_loads()),
            )
            for one in (ours, stock)
        )
        if told != true:
            raise Died(f"{len(waiting)} wait, and the load is said to be {told}, but is {true}")
        uncached = sum(one.seqlen - one.num_matched_prefix_tokens for one in waiting)
        if (said := scheduler.fair.waiting_tokens) != uncached:
            raise Died(f"{uncached} tokens wait that are not cached, and {said} are said to")

    def check(self) -> None:
        from sglang_fair.overlay.books import JOB_ATTRIBUTE

        scheduler, fair = self.scheduler, self.scheduler.fair
        wrong = {rid: self.ended[rid] for rid in self.sent if self.ended[rid] != 1}
        assert not wrong, f"ended so often: {wrong}"
        assert set(self.ended) <= set(self.sent)
        tree, allocator = scheduler.tree_cache, scheduler.token_to_kv_pool_allocator
        assert tree.protected_size() == 0
        assert allocator.available_size() + tree.evictable_size() == allocator.size
        assert scheduler.req_to_token_pool.available_size() == scheduler.req_to_token_pool.size
        status = fair.status([])
        books = status["conservation"]
        assert books["ok"], books
        assert fair.corrections == 0, f"{fair.corrections} corrections"
        assert books["engine_extend_tokens"] == self.extended
        given = sum(len(one.output_ids) for one in self.requests.values())
        assert books["charged_output_tokens"] == given, (books, given)
        made: Counter[str] = Counter()
        for one in self.requests.values():
            carried, output = one.sampling_params.custom_params["fair"], len(one.output_ids)
            asked = 0 if "system" in carried else min(output, one.sampling_params.max_new_tokens)
            made.update({carried["client"]: asked, SYSTEM: output - asked})
        charged = {name: client["output_tokens"] for name, client in status["clients"].items()}
        assert made == Counter(charged), (made, charged)
        if (steps := fair._admission.steps) is not None:
            assert steps.largest_lag_s <= steps.bound_s + 1e-9
        admission, queue = fair._admission, fair.queue
        for kept in (
            [rid for rid, one in self.requests.items() if (job := getattr(one, JOB_ATTRIBUTE, None)) and job.request],
            [name for of in fair._interactions._clients.values() for name, one in of.items() if one.under_way],
            fair._taken_back, queue._jobs, queue._clients,
            queue.account.running, admission._prefixes._computing,
            *(() if (steps := admission.steps) is None else (steps._present, steps._decoding, steps._runners)),
            *(() if admission.preemption is None else (admission.preemption._times,)),
        ):  # fmt: skip
            assert not kept, f"left behind: {kept}"


def without_time(load: Any) -> list[Any]:
    return [getattr(load, name) for name in load.__struct_fields__ if name != "timestamp"]


def main(loop: str, seed: str, cases: str, *policies: str) -> None:
    server = Loop(loop, int(seed))
    told: dict[str, Any] = {
        "requests": Counter(),
        "aborted": Counter(),
        "steps": Counter(),
        "retracted": 0,
        "walks": 0,
    }
    chosen = policies or tuple(POLICIES)
    for number in range(int(cases)):
        policy = chosen[(number + int(seed)) % len(chosen)]
        case = server.serve(policy, server.random.randint(50, 130))
        told["requests"][policy] += len(case.sent)
        told["aborted"] += case.aborted
        told["steps"] += case.steps
        told["walks"] += case.walks
        told["retracted"] += sum(one.retraction_count for one in case.requests.values())
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
