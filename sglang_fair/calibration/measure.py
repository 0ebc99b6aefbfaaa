"""Measuring an SGLang server over HTTP: any that takes token ids on /generate and has nothing else to do."""

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from random import Random
from statistics import median
from typing import Any

import aiohttp

from sglang_fair.calibration.grid import (
    CROWD,
    CROWD_TOKENS,
    TAIL_TOKENS,
    GridCell,
    ReplicaLimits,
    TimedCell,
    grid,
    simulated_crowd,
    under_load,
)
from sglang_fair.common.provenance import machine, versions
from sglang_fair.sim.cost_model import to_json
from sglang_fair.sim.fitting import errors, fit

PLUG_S = 0.1
"""Least time that a plug should take. A batch's way to the engine takes less."""

TOKEN_IDS = range(3, 256)
"""Prompts are drawn from these ids: every vocabulary has them, and mostly as plain tokens."""

LONGEST_TOKENS = 8192
"""The longest context that is measured by default."""

Say = Callable[[str], None]


class CalibrationError(Exception):
    """The replica cannot be measured; the text says why, in one line."""


class MeasuredReplica:
    """The server that is measured, through its /generate."""

    def __init__(self, session: aiohttp.ClientSession, url: str, rng: Random) -> None:
        self._session, self._url, self._rng = session, url.rstrip("/"), rng
        self.limits = ReplicaLimits(1, 1, 1, 1, 1)
        self._plug_tokens = 0

    async def connect(self) -> Mapping[str, Any]:
        """Asks for its limits and finds out how long a plug must be. Returns its /server_info."""
        try:
            async with self._session.get(f"{self._url}/server_info") as response:
                if response.status != 200:
                    raise ValueError(f"HTTP {response.status}")
                info = dict(json.loads(await response.read()))
        except (aiohttp.ClientError, TimeoutError) as error:
            raise CalibrationError(f"cannot reach {self._url}: {str(error) or 'no answer'}") from None
        except (ValueError, TypeError) as error:
            raise CalibrationError(f"{self._url}/server_info: is it an SGLang server? {error}") from None
        self.limits = ReplicaLimits.of_server(info)
        await self.generate([self.prompt(self.limits.page_tokens + 1)], 2)  # warms it up
        self._plug_tokens = await self._find_plug()
        return info

    def prompt(self, tokens: int) -> list[int]:
        return self._rng.choices(TOKEN_IDS, k=tokens)

    async def generate(
        self, prompts: Sequence[Sequence[int]], output_tokens: int
    ) -> tuple[list[Mapping[str, Any]], float]:
        """Sends these requests together. Returns the server's `meta_info` of each, and when the last one ended.

        Answers are streamed, as most clients ask for: the scheduler hands out each token.
        """
        sampling = {"max_new_tokens": output_tokens, "ignore_eos": True, "temperature": 0.0}
        body = {"input_ids": list(prompts), "sampling_params": sampling, "stream": True}
        answers: dict[int, Mapping[str, Any]] = {}
        try:
            async with self._session.post(
                f"{self._url}/generate", json=body, headers={"x-fair-client": "calibrate"}
            ) as response:
                if response.status != 200:
                    text = " ".join((await response.text())[:200].split())
                    raise CalibrationError(f"{self._url} refused a request: HTTP {response.status}: {text}")
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        event = json.loads(line[len(b"data: ") :])
                        if "error" in event:
                            raise CalibrationError(f"{self._url} ended a request: {event['error']}")
                        answers[event.get("index", 0)] = event["meta_info"]
        except (aiohttp.ClientError, TimeoutError) as error:
            said = str(error) or "timed out"
            raise CalibrationError(f"{self._url} failed during the measurement: {said}") from None
        except (ValueError, LookupError, TypeError) as error:
            raise CalibrationError(f"{self._url} does not answer as SGLang does: {error!r}") from None
        if len(answers) < len(prompts):
            raise CalibrationError(f"{self._url} answered {len(answers)} of {len(prompts)} requests")
        return [answers[place] for place in range(len(prompts))], time.monotonic()

    async def measure(self, cell: GridCell, tries: int) -> TimedCell:
        """Times one batch `tries` times, each time with new prompts behind the same prefixes."""
        prefixes = [self.prompt(cell.cached_tokens) for _ in range(cell.requests)]
        if cell.cached_tokens:
            for prefix in prefixes:
                await self.generate([prefix], 1)
        extends: tuple[tuple[int, int], ...] = ()
        tries_s: list[float] = []
        for _ in range(2 * tries):
            extends, seconds = await self._once(prefixes, cell)
            if seconds > 0:
                tries_s.append(seconds)
            if len(tries_s) == tries:
                return TimedCell(cell, extends, tuple(tries_s))
        raise CalibrationError(
            f"{cell}: answers overtook each other most of the time; is the machine, or the replica, busy?"
        )

    async def _once(
        self, prefixes: Sequence[Sequence[int]], cell: GridCell
    ) -> tuple[tuple[tuple[int, int], ...], float]:
        """The (computed, cached) tokens of each request of the batch, and its seconds behind a plug."""
        prompts = [[*prefix, *self.prompt(cell.extend_tokens)] for prefix in prefixes]
        plug = asyncio.create_task(self.generate([self.prompt(self._plug_tokens)], 1))
        try:
            await asyncio.sleep(PLUG_S / 10)
            answers, done_s = await self.generate(prompts, 1 + cell.steps)
            _, plugged_s = await plug
        finally:
            plug.cancel()
            await asyncio.gather(plug, return_exceptions=True)
        extends = tuple(
            (answer["prompt_tokens"] - answer["cached_tokens"], answer["cached_tokens"]) for answer in answers
        )
        return extends, done_s - plugged_s

    async def alone_s(self, tries: int) -> tuple[tuple[tuple[int, int], ...], float]:
        """One short request for one token on an idle server: its (computed, cached) tokens, and the median seconds."""
        times, tokens = [], TAIL_TOKENS
        for _ in range(tries):
            began_s = time.monotonic()
            _, done_s = await self.generate([self.prompt(tokens)], 1)
            times.append(done_s - began_s)
        return ((tokens, 0),), median(times)

    async def _find_plug(self) -> int:
        """The length of a prompt, in whole chunks, that takes `PLUG_S`, or the longest that fits."""
        most = min(self.limits.context_tokens - 2, self.limits.pool_tokens // 4)
        tokens = self.limits.chunk_tokens
        while True:
            began_s = time.monotonic()
            _, done_s = await self.generate([self.prompt(min(tokens, most))], 1)
            if done_s - began_s >= PLUG_S or 2 * tokens > most:
                return min(tokens, most)
            tokens *= 2


async def calibrate(
    url: str, *, longest_tokens: int = LONGEST_TOKENS, quick: bool = False, seed: int = 0, say: Say
) -> dict[str, Any]:
    """Measures the server at `url` and fits the model. Returns what the calibration's file holds.

    Raises CalibrationError.
    """
    tries = 3 if quick else 5
    started_unix_s = time.time()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
        replica = MeasuredReplica(session, url, Random(seed))
        info = await replica.connect()
        cells, timed = grid(replica.limits, longest_tokens, quick=quick), []
        for place, cell in enumerate(cells):
            timed.append(await replica.measure(cell, tries))
            took = timed[-1].measurement.seconds
            say(f"[{place + 1}/{len(cells)}] {cell}: {took * 1e3:.1f} ms, spread {timed[-1].spread:.0%}")
        crowd = GridCell(CROWD * replica.limits.running, CROWD_TOKENS, steps=TAIL_TOKENS)
        crowd_s = (await replica.measure(crowd, tries)).measurement.seconds
        alone, alone_s = await replica.alone_s(2 * tries)
    measured = [each.measurement for each in timed]
    try:
        fitted = fit(measured)
    except ValueError as error:
        raise CalibrationError(str(error)) from None
    modelled_s, steps = simulated_crowd(crowd, fitted, replica.limits)
    scheduling_s = max(0.0, (crowd_s - modelled_s) / steps)
    model = under_load(fitted, scheduling_s)
    say(f"a crowd of {crowd.requests}: {crowd_s:.2f} s, by the fit {modelled_s:.2f} s")
    return {
        "cost_model": to_json(model),
        "fit": {
            "all": asdict(errors(fitted, measured)),
            "prefill": asdict(errors(fitted, [each for each in measured if not each.steps])),
            "decode": asdict(errors(fitted, [each for each in measured if each.steps])),
            "spread_of_tries": median(each.spread for each in timed),
        },
        "crowd": {"requests": crowd.requests, "seconds": crowd_s, "fitted_s": modelled_s, "steps": steps},
        "scheduling_s": scheduling_s,
        "hop_s": max(0.0, alone_s - fitted.prefill_s(alone)),
        "limits": asdict(replica.limits),
        "server": {
            key: info.get(key)
            for key in ("version", "model_path", "device", "dtype", "schedule_policy", "tp_size")
        },
        "measured": [
            {
                **asdict(each.cell),
                "extends": sorted(set(each.extends)),
                "tries_s": each.tries_s,
                "predicted_s": each.measurement.predicted_s(fitted),
            }
            for each in timed
        ],
        "longest_tokens": longest_tokens,
        "quick": quick,
        "seed": seed,
        "versions": versions(),
        "machine": machine(),
        "started_unix_s": started_unix_s,
    }
