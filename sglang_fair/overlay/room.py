"""Memory as SGLang's admission counts it, and what of it is kept for the prompt that was cut.

SGLang counts as taken what those that run may still write, and of a prompt that was cut no more than the chunk that is
computed: it computes such a prompt to its end before anything else. With the rule of steps others are admitted and
decode in between. So until a cut prompt is computed, its whole rest counts as taken for everything else:

    admissions      the rest, a page and its output are taken, whether it has a chunk in this batch or is parked
    (`kept_for`)
    decode steps    none is made that would take of the rest: then the prompt goes on (`can_decode`), and those that
                    run wait for its end, as in stock SGLang
    its own chunk   at most what is free or may be evicted; if that is nothing, it is parked (`FairPrefillAdder`)

A prompt is first cut only if all of it has room, so there is always room for the rest: it never waits for memory that
those that run must give up first, and none of them is taken back for it. One that the empty pool has no room for is
refused (`never_fits`): SGLang lets a prompt wait that leaves less than a page, and admits none behind it, for ever.
"""

from typing import Any

from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS


def most_output(request: Any) -> int:
    """What SGLang keeps for its output at most."""
    return int(
        min(max(request.sampling_params.max_new_tokens - len(request.output_ids), 0), CLIP_MAX_NEW_TOKENS)
    )


def rest_of(cut: Any, page_tokens: int) -> int:
    """The tokens that the rest of a cut prompt takes: whole pages. 0 without one."""
    if cut is None:
        return 0
    rest = len(cut.origin_input_ids) + len(cut.output_ids) - cut.extend_end
    return int(-(-rest // page_tokens) * page_tokens)


def kept_for(cut: Any, page_tokens: int) -> int:
    """What no other request may be admitted to: the rest of a cut prompt and its output. 0 without one."""
    return 0 if cut is None else rest_of(cut, page_tokens) + page_tokens + most_output(cut)


def never_fits(scheduler: Any, request: Any) -> str | None:
    """Why `request`, which is about to wait, would never be admitted, for its sender; None: it fits, alone."""
    known = len(request.origin_input_ids) + len(request.output_ids)
    most = scheduler.max_total_num_tokens * scheduler.kv_shard_widening - scheduler.page_size
    if known + most_output(request) < most:
        return None
    return f"the request has {known} tokens: the KV cache has room for fewer than {most}"


def free_tokens(allocator: Any, tree: Any) -> int:
    """Tokens that are free or may be evicted."""
    return int(allocator.create_prefill_budget(tree).remaining_total)


def can_decode(batch: Any, cut: Any = None) -> bool:
    """Whether `batch` could make a decode step with the memory that there is beside the rest of the prompt `cut`."""
    if batch is None or batch.is_empty() or batch.is_prefill_only:
        return False
    if cut is not None:
        allocator = batch.token_to_kv_pool_allocator
        kept = rest_of(cut, allocator.page_size)
        free = free_tokens(allocator, batch.tree_cache)
        if free - batch.new_tokens_required_next_decode() < kept:
            return False
    return bool(batch.check_decode_mem())
