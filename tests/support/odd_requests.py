"""What no client should send and no hook reports, on SGLang's real scheduler: `python -m tests.support.odd_requests`
prints the books after each scenario as JSON. The scheduler has to be alone in its process."""

import json
import os
import traceback
from array import array
from collections.abc import Callable
from typing import Any

from sglang_fair.engines.bench.one_process import PAGE_TOKENS, Engine

STEPS = 40
OUTPUT_TOKENS = 5
SHARED_TOKENS = 192
"""Three blocks of 64."""


class Odd:
    """One engine for all scenarios; each begins with a new scheduler policy."""

    def __init__(self) -> None:
        self.engine = Engine(admit_per_step=10_000, seed=0)
        self.scheduler = self.engine._scheduler
        self.chunk = self.scheduler.chunked_prefill_size

    def request(self, name: str, client: str, tokens: int = 40, first: int = 1) -> Any:
        prompt = array("q", [first + at % 50 for at in range(tokens)])
        return self.engine.request(name, client, prompt, OUTPUT_TOKENS)

    def finish(self) -> dict[str, Any]:
        """Steps until all is done; the books."""
        for _ in range(STEPS):
            self.engine.step()
        books: dict[str, Any] = self.scheduler.fair.status(self.scheduler.waiting_queue)
        assert self.scheduler.running_batch.is_empty()
        return books

    def two_requests_with_one_id(self) -> dict[str, Any]:
        """Both wait at once, then one runs while a third comes."""
        self.engine.use("dlpm", overlay=True)
        self.engine.arrive([self.request("same", "a"), self.request("same", "b", first=60)])
        self.engine.step()
        self.engine.step()
        self.engine.arrive([self.request("same", "c", first=120), self.request("same (2)", "d", first=180)])
        return self.finish()

    def an_id_like_a_health_checks(self) -> dict[str, Any]:
        """In a batch, whose requests SGLang does not drop."""
        self.engine.use("dlpm", overlay=True)
        self.engine.arrive([self.request(f"HEALTH_CHECK_{number}", "liar", first=60) for number in range(3)])
        return self.finish()

    def a_system_prompt_that_three_share(self) -> dict[str, Any]:
        """One request after the other, in chunks that end in the middle of blocks."""
        os.environ["SGLANG_FAIR_PAYER"] = "equal"
        chunk, self.scheduler.chunked_prefill_size = self.scheduler.chunked_prefill_size, 96
        self.engine.use("dlpm", overlay=True)
        for number, client in enumerate(("a", "b", "b", "c")):
            prompt = array("q", [*range(1, 1 + SHARED_TOKENS), *[number + 1] * 40])
            self.engine.arrive([self.engine.request(f"{number}", client, prompt, OUTPUT_TOKENS)])
            books = self.finish()
        self.scheduler.chunked_prefill_size = chunk
        del os.environ["SGLANG_FAIR_PAYER"]
        return books

    def requests_that_join_unseen(self) -> dict[str, Any]:
        """As in the loops of a prefill server, which extend the queue."""
        self.engine.use("fcfs", overlay=True)
        self.scheduler.fair._sees_all = False
        self.engine.arrive([self.request("seen", "a")])
        self.scheduler.waiting_queue.extend([self.request("unseen", "b", first=60)])
        self.engine.step()
        # One leaves and one joins: their number stays.
        self.engine.arrive([self.request("leaves", "c", first=120)])
        self.scheduler.waiting_queue.clear()
        self.scheduler.waiting_queue.append(self.request("joins", "d", first=180))
        return self.finish()

    def requests_that_join_a_fair_queue_unseen(self) -> dict[str, Any]:
        """Nothing of SGLang's does that where a fair policy is allowed; it must not be fatal."""
        self.engine.use("dlpm", overlay=True)
        self.engine.arrive([self.request("seen", "a")])
        self.scheduler.waiting_queue.extend([self.request("unseen", "b", first=60)])
        return self.finish()

    def requests_whose_prompt_another_server_computed(self) -> dict[str, Any]:
        """As on a decode server: no batch of ours admits them, and they come with their first token."""
        self.engine.use("fcfs", overlay=True)
        self.scheduler.fair._sees_all = False
        self.scheduler.waiting_queue.extend([self.request("1", "a"), self.request("2", "b", first=60)])
        kind, ours = type(self.scheduler), {}
        for name in ("_get_new_batch_prefill_raw", "get_prefill_adder_class", "process_batch_result"):
            ours[name] = vars(kind)[name]
            setattr(kind, name, self.engine._stock[self.engine._names.index(name)])
        self.engine._watch()
        self.engine.step()
        for name, function in ours.items():
            setattr(kind, name, function)
        self.engine._watch()
        return self.finish()

    def a_policy_that_fails(self) -> dict[str, Any]:
        """Once, while it is asked for a candidate."""
        self.engine.use("dlpm", overlay=True)
        fair = self.scheduler.fair
        self.engine.arrive([self.request("runs", "a")])
        self.engine.step()

        def fails() -> None:
            raise KeyError("nobody")

        fair.queue.policy.pick = fails
        self.engine.arrive([self.request("waits", "b", first=60)])
        return self.finish()

    def books_that_begin_anew_before_a_retraction(self) -> dict[str, Any]:
        """What the request had made of its output is charged already."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self.engine.use("dlpm", overlay=True)
        fair = self.scheduler.fair
        self.engine.arrive([self.request("runs", "a")])
        for _ in range(4):
            self.engine.step()
        try:
            raise KeyError("nobody")
        except KeyError:
            fair.begin_anew("a test")
        self.scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
        self.scheduler._engine_paused = False
        return self.finish()

    def a_cut_prompt_beside_short_ones(self) -> dict[str, Any]:
        """An attention kernel wants prompts to be cut at multiples of 64. `cuts` has where the long one was."""
        self.engine.use("dlpm", overlay=True)
        align, chunk = self.scheduler.truncation_align_size, self.scheduler.chunked_prefill_size
        self.scheduler.truncation_align_size, self.scheduler.chunked_prefill_size = 64, 512
        long = self.request("long", "a", tokens=2000)
        self.engine.arrive([long])
        cuts = []
        for number in range(STEPS):
            self.engine.step()
            if self.scheduler.chunked_req is long and long.extend_end not in cuts:
                cuts.append(long.extend_end)
                self.engine.arrive([self.request(f"short {number}", "b", first=60 * number)])
        self.scheduler.truncation_align_size, self.scheduler.chunked_prefill_size = align, chunk
        return {**self.finish(), "cuts": cuts}

    def a_queue_that_a_drainer_of_adapters_looks_at(self) -> dict[str, Any]:
        """SGLang's own, before each admission loop. `order` has the clients of those admitted, one a step."""
        from sglang.srt.lora.lora_drainer import LoRADrainer

        scheduler, order = self.scheduler, list[str]()
        self.engine.use("dlpm", overlay=True)
        scheduler.enable_lora, scheduler.lora_drainer = True, LoRADrainer(8, 1.0)
        scheduler.can_schedule_lora_req = lambda request, running: scheduler.lora_drainer.can_schedule(
            request
        )
        self.engine.arrive([self.request("first", "a")])
        self.engine.step()
        queue = scheduler.fair.queue
        admit = queue.admit

        def admitted(job: Any, **more: Any) -> None:
            order.append(job.client)
            admit(job, **more)

        queue.admit = admitted
        self.engine.arrive([self.request("second", "a", first=60), self.request("third", "b", first=120)])
        books = self.finish()
        scheduler.enable_lora, scheduler.lora_drainer = False, None
        del scheduler.can_schedule_lora_req
        return {**books, "order": order}

    def a_cut_prompt_without_room(self) -> dict[str, Any]:
        """Something else takes all that is free between two of its chunks, and gives it back."""
        self.engine.use("dlpm", overlay=True)
        chunk, self.scheduler.chunked_prefill_size = self.scheduler.chunked_prefill_size, 128
        long = self.request("long", "a", tokens=600)
        self.engine.arrive([long])
        self.engine.step()
        allocator = self.scheduler.token_to_kv_pool_allocator
        taken = allocator.alloc(allocator.available_size() - 96)
        ends = [long.extend_end]
        for _ in range(4):
            self.engine.step()
            ends.append(long.extend_end)
        allocator.free(taken)
        books = self.finish()
        self.scheduler.chunked_prefill_size = chunk
        return {**books, "ends": ends}

    def a_short_prompt_behind_a_cut_one(self) -> dict[str, Any]:
        """It has room in the rest of the step, but the rest of the cut prompt has all the memory."""
        self.engine.use("dlpm", overlay=True)
        self.engine.limit_pool(448)
        align, chunk = self.scheduler.truncation_align_size, self.scheduler.chunked_prefill_size
        self.scheduler.truncation_align_size, self.scheduler.chunked_prefill_size = 64, 96
        short = self.request("short", "b", tokens=20, first=60)
        self.engine.arrive([self.request("long", "a", tokens=400), short])
        self.engine.step()
        beside = short.kv.holds_kv
        books = self.finish()
        self.scheduler.truncation_align_size, self.scheduler.chunked_prefill_size = align, chunk
        return {**books, "beside": beside}

    def cut_beside_runners(self, policy: str, free_tokens: int) -> tuple[Any, list[Any]]:
        """A prompt that was cut, and twelve that run and need a page each for their next token: 192 in all. So many
        tokens are free beside the prompt's rest."""
        self.engine.use(policy, overlay=True)
        self.scheduler.chunked_prefill_size = 512
        long = self.request("long", "a", tokens=2000)
        runners = [self.request(f"runs {number}", "a", tokens=32, first=10 * number) for number in range(12)]
        self.engine.arrive([*runners, long])
        self.engine.step()
        assert self.scheduler.chunked_req is long
        self.engine.limit_pool(2000 - long.extend_end + free_tokens)
        return long, runners

    def lacking(self, steps: int = 1) -> int:
        """By how many tokens the rest of the cut prompt lacked room in so many steps, at most."""
        from sglang_fair.overlay import room

        allocator, tree = self.scheduler.token_to_kv_pool_allocator, self.scheduler.tree_cache
        most = 0
        for _ in range(steps):
            self.engine.step()
            rest = room.rest_of(self.scheduler.chunked_req, allocator.page_size)
            most = max(most, rest - room.free_tokens(allocator, tree))
        return most

    def followed(self, **more: Any) -> dict[str, Any]:
        """The books at the end, and what the rest of the cut prompt lacked."""
        found = {"lacking": self.lacking(STEPS), **more, **self.finish()}
        self.scheduler.chunked_prefill_size, self.scheduler.is_mixed_chunk = self.chunk, False
        return found

    def decodes_in_the_steps_of_a_cut_prompt(self) -> dict[str, Any]:
        """Steps are mixed, and what is free beside its rest is less than they need."""
        self.cut_beside_runners("dlpm", 64)
        self.scheduler.is_mixed_chunk = True
        return self.followed()

    def another_prompt_in_a_mixed_step_of_a_cut_one(self) -> dict[str, Any]:
        """It has room beside the rest, and so have those that decode, but not both."""
        self.cut_beside_runners("dlpm", 192 + 128)
        self.scheduler.is_mixed_chunk = True
        self.engine.arrive([self.request("beside", "b", tokens=150, first=130)])
        fair = self.scheduler.fair
        chunk_of, fair.chunk_of = fair.chunk_of, lambda cut, budget: 256
        lacking = self.lacking()
        fair.chunk_of = chunk_of
        return self.followed() | {"lacking": lacking}

    def another_prompt_beside_a_parked_one(self) -> dict[str, Any]:
        """It has no room beside the rest of the one that gives way to it."""
        self.cut_beside_runners("dlpm", 192 + 64)
        self.engine.arrive([self.request("beside", "b", tokens=300, first=130)])
        fair = self.scheduler.fair
        goes_on, fair.goes_on = fair.goes_on, lambda cut: False
        lacking = self.lacking()
        fair.goes_on = goes_on
        return self.followed() | {"lacking": lacking}

    def an_urgent_prompt_beside_a_cut_one(self) -> dict[str, Any]:
        """`missing` has what it lacks with and without the cut one, and `kept` what that one is to have."""
        long, runners = self.cut_beside_runners("slo", 64)
        urgent = self.request("urgent", "b", tokens=150, first=130)
        urgent.init_next_round_input(self.scheduler.tree_cache)
        self.engine.step()
        missing = [self.scheduler.preempt._missing(urgent, runners).tokens]
        kept = 2000 - long.extend_end // PAGE_TOKENS * PAGE_TOKENS + PAGE_TOKENS + OUTPUT_TOKENS
        self.scheduler.chunked_req = None
        missing.append(self.scheduler.preempt._missing(urgent, runners).tokens)
        self.scheduler.chunked_req = long
        return self.followed(missing=missing, kept=kept)

    def twins_that_take_a_state_when_they_are_matched(self) -> dict[str, Any]:
        """As requests of a Mamba model do: what they are matched with is copied to a slot of theirs. More come at once
        than are looked up before a pass. `slots` are those that are taken, and those that are back, after the pass."""
        from sglang.srt.mem_cache.allocator.mamba import MambaSlotAllocator

        self.engine.use("dlpm", overlay=True)
        pool, taken = self.scheduler.req_to_token_pool, 0
        slots = pool.mamba_allocator = MambaSlotAllocator(100, "cpu")
        twins = [self.request(f"twin {number}", "b", tokens=100) for number in range(80)]

        def takes_a_slot(request: Any) -> Callable[..., None]:
            def match(*args: Any) -> None:
                nonlocal taken
                type(request).init_next_round_input(request, *args)
                request.kv.mamba_pool_idx = request.kv.mamba_cow_src_index = slots.alloc(1)[0]
                taken += 1

            return match

        for twin in twins:
            twin.init_next_round_input = takes_a_slot(twin)
        self.engine.arrive([self.request("first", "a", tokens=100), *twins])
        self.engine.step()
        back = taken - (slots.size - slots.available_size())
        stale = sum(twin.kv.mamba_cow_src_index is not None for twin in twins)
        del pool.mamba_allocator
        for twin in twins:
            twin.kv.mamba_pool_idx = twin.kv.mamba_cow_src_index = None
            del twin.init_next_round_input
        return {**self.finish(), "slots": (taken, back, stale)}


SCENARIOS: tuple[Callable[[Odd], dict[str, Any]], ...] = (
    Odd.two_requests_with_one_id,
    Odd.an_id_like_a_health_checks,
    Odd.a_system_prompt_that_three_share,
    Odd.requests_that_join_unseen,
    Odd.requests_that_join_a_fair_queue_unseen,
    Odd.requests_whose_prompt_another_server_computed,
    Odd.a_policy_that_fails,
    Odd.books_that_begin_anew_before_a_retraction,
    Odd.a_cut_prompt_beside_short_ones,
    Odd.a_queue_that_a_drainer_of_adapters_looks_at,
    Odd.a_cut_prompt_without_room,
    Odd.a_short_prompt_behind_a_cut_one,
    Odd.decodes_in_the_steps_of_a_cut_prompt,
    Odd.another_prompt_in_a_mixed_step_of_a_cut_one,
    Odd.another_prompt_beside_a_parked_one,
    Odd.an_urgent_prompt_beside_a_cut_one,
    Odd.twins_that_take_a_state_when_they_are_matched,
)


def main() -> None:
    odd = Odd()
    told = {}
    for scenario in SCENARIOS:
        try:
            told[scenario.__name__] = scenario(odd)
        except Exception:
            told[scenario.__name__] = {"killed": traceback.format_exc()}
            odd.scheduler.waiting_queue = []
    print(json.dumps(told))


if __name__ == "__main__":
    main()
