"""What a token costs on this machine: a decoded one against a prefilled one, on one idle replica.

On an A100 with an 8B model a decoded token costs about three prefilled ones. Where it costs far more,
locality saves little and throughput says little about schedulers; so the ratio stands beside the results.
"""

import time
from dataclasses import dataclass
from random import Random
from statistics import median

import aiohttp

from sglang_fair.calibration.measure import CalibrationError, MeasuredReplica


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
    rng: Random,
    *,
    batch: int = 16,
    prompt_tokens: int = 1024,
    output_tokens: int = 32,
    tries: int = 3,
) -> Probe:
    """Measure `replica`, which must be idle. Differences of two lengths each, so fixed costs drop out.

    Prompts are random, so nothing is cached. Raises RuntimeError if the replica refuses, or if the clock says that more
    work took less time.
    """
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        engine = MeasuredReplica(session, replica, rng)

        async def timed(requests: int, tokens: int, output_tokens: int) -> float:
            """Seconds until all of these, sent at once, are answered."""
            began_s = time.monotonic()
            _, done_s = await engine.generate([engine.prompt(tokens) for _ in range(requests)], output_tokens)
            return done_s - began_s

        short, prefills, decodes = prompt_tokens // 8, [], []
        try:
            await timed(1, prompt_tokens, 2)  # whatever happens only once
            for _ in range(tries):
                prefill_s = await timed(2, prompt_tokens, 1) - await timed(2, short, 1)
                prefills.append(prefill_s / (2 * (prompt_tokens - short)))
                decode_s = await timed(batch, 16, 1 + output_tokens) - await timed(batch, 16, 1)
                decodes.append(decode_s / (batch * output_tokens))
        except CalibrationError as error:
            raise RuntimeError(str(error)) from error
    measured = Probe(median(prefills), median(decodes), batch)
    if measured.prefill_s_per_token <= 0 or measured.decode_s_per_token <= 0:
        raise RuntimeError(f"the probe of {replica} makes no sense, is the machine busy? {measured}")
    return measured
