"""What a token costs on this machine: a decoded one against a prefilled one, on one idle replica.

On an A100 with an 8B model a decoded token costs about three prefilled ones. Where it costs far more,
locality saves little and throughput says little about schedulers; so the ratio stands beside the results.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import median
from typing import Any

import aiohttp


@dataclass(frozen=True, slots=True)
class Probe:
    """Seconds of one replica's time per token, medians of several tries."""

    prefill_s_per_token: float
    decode_s_per_token: float
    """At `batch` requests side by side."""
    batch: int

    @property
    def ratio(self) -> float:
        """How many prefilled tokens a decoded one costs."""
        return self.decode_s_per_token / self.prefill_s_per_token


async def probe(
    replica: str,
    *,
    batch: int = 16,
    prompt_tokens: int = 1024,
    output_tokens: int = 32,
    tries: int = 3,
    rng: Random,
    token_ids: range = range(256),
) -> Probe:
    """Measure `replica`, which must be idle. Differences of two lengths each, so fixed costs drop out.

    Prompts are random draws from `token_ids`, so nothing is cached. Raises RuntimeError if the replica
    refuses, or if the clock says that more work took less time.
    """

    def prompt(tokens: int) -> list[int]:
        return rng.choices(token_ids, k=tokens)

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        await _timed(session, replica, [prompt(prompt_tokens)], 2)  # whatever happens only once
        short, prefills, decodes = prompt_tokens // 8, [], []
        for _ in range(tries):
            long_s = await _timed(session, replica, [prompt(prompt_tokens) for _ in range(2)], 1)
            short_s = await _timed(session, replica, [prompt(short) for _ in range(2)], 1)
            prefills.append((long_s - short_s) / (2 * (prompt_tokens - short)))
            many = [prompt(16) for _ in range(batch)]
            full_s = await _timed(session, replica, many, 1 + output_tokens)
            many = [prompt(16) for _ in range(batch)]
            first_s = await _timed(session, replica, many, 1)
            decodes.append((full_s - first_s) / (batch * output_tokens))
    measured = Probe(median(prefills), median(decodes), batch)
    if measured.prefill_s_per_token <= 0 or measured.decode_s_per_token <= 0:
        raise RuntimeError(f"the probe of {replica} makes no sense, is the machine busy? {measured}")
    return measured


async def _timed(
    session: aiohttp.ClientSession, replica: str, prompts: Sequence[Sequence[int]], output_tokens: int
) -> float:
    """Seconds until all of these, sent at once, are answered."""
    start_s = time.monotonic()
    await asyncio.gather(*(_ask(session, replica, prompt, output_tokens) for prompt in prompts))
    return time.monotonic() - start_s


async def _ask(
    session: aiohttp.ClientSession, replica: str, prompt: Sequence[int], output_tokens: int
) -> None:
    sampling = {"max_new_tokens": output_tokens, "ignore_eos": True, "temperature": 0.0}
    body: dict[str, Any] = {"input_ids": list(prompt), "sampling_params": sampling}
    url, headers = f"{replica.rstrip('/')}/generate", {"x-fair-client": "probe"}
    async with session.post(url, json=body, headers=headers) as response:
        if response.status != 200:
            raise RuntimeError(
                f"{replica} refused the probe: HTTP {response.status}: {(await response.text())[:200]}"
            )
        await response.read()
