"""Measure a replica, and fit the cost model with which emulated and simulated replicas keep its time.

    sglang-fair calibrate http://127.0.0.1:30000 --out bench.json

Any SGLang server that takes token ids on /generate, and is idle otherwise. What is measured: batches of
requests over a grid of prompt lengths, cached prefixes, batch sizes, contexts and steps of decoding. A batch
must begin as one, and a client's clock must not count HTTP; so before each batch goes a *plug*, a prompt long
enough that the batch waits behind it as a whole. From the answer to the plug until the answer to the batch
the engine did the batch and nothing else, and both answers came the same way.

At the end comes a *crowd*, four times as many short requests as can run at once. What it takes beyond what
the simulator says of it, divided by its steps, is time in which requests wait and the scheduler looks for the
next one; an engine that does not schedule ahead adds it to each step under load, and so does the model.

The file that is written has the coefficients, how far the model is from what was measured, and the
measurements. `--cost-model FILE` of a simulation, or of an emulated cluster, reads it.

Exit code 0, 1 if the replica could not be measured, 2 for bad input, 130 after Ctrl-C.
"""

import argparse
import asyncio
import json
import sys
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import aiohttp

from sglang_fair.common.provenance import machine, versions
from sglang_fair.core.cost import Linear
from sglang_fair.core.fcfs import Fcfs
from sglang_fair.core.queue import FairQueue
from sglang_fair.sim.cost_model import CostModel, Fitted, to_json
from sglang_fair.sim.fitting import Measurement, errors, fit
from sglang_fair.sim.replica import Replica as SimReplica
from sglang_fair.sim.replica import Settings, SimRequest

PLUG_S = 0.1
"""How long a plug should take at least: a batch's way to the engine is shorter."""

BUSY_SPREAD = 0.5
"""Between the fastest and the slowest of equal measurements; more than that is not the replica's."""

TOKEN_IDS = range(3, 256)
"""Prompts are drawn from these. Every vocabulary has them, and mostly as plain tokens."""

LONGEST_TOKENS = 8192
"""How long a context is measured, by default."""

SHORTEST_TOKENS = 512
"""Below this, there is nothing to see of a context's length."""

Say = Callable[[str], None]


class CalibrationError(Exception):
    """The replica cannot be measured; the text says why, in one line."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one batch of the replica can be."""

    chunk_tokens: int
    """Computed in one prefill batch."""
    pool_tokens: int
    running: int
    context_tokens: int
    page_tokens: int

    @classmethod
    def of_server(cls, info: Mapping[str, Any]) -> "Limits":
        """From GET /server_info."""

        def number(key: str, default: int) -> int:
            value = info.get(key)
            return value if isinstance(value, int) and value > 0 else default

        most = number("max_prefill_tokens", 16_384)
        return cls(
            chunk_tokens=min(number("chunked_prefill_size", most), most),
            pool_tokens=number("max_total_num_tokens", 65_536),
            running=number("max_running_requests", 64),
            context_tokens=number("context_length", number("max_req_input_len", 4096)),
            page_tokens=number("page_size", 1),
        )


@dataclass(frozen=True, slots=True)
class Cell:
    """One batch of the grid: so many requests, each with these tokens to compute behind cached ones."""

    requests: int
    extend_tokens: int
    cached_tokens: int = 0
    steps: int = 0

    def __str__(self) -> str:
        behind = f" behind {self.cached_tokens} cached" if self.cached_tokens else ""
        decoding = f", {self.steps} steps" if self.steps else ""
        return f"{self.requests} x {self.extend_tokens} tokens{behind}{decoding}"


CROWD, CROWD_TOKENS = 4, 64
"""How many times as many requests as can run, and the length of each prompt."""

TAIL_TOKENS = 16
"""Computed before decoding is measured; the rest of the context is cached."""


def grid(limits: Limits, longest_tokens: int, *, quick: bool = False) -> list[Cell]:
    """What to measure: prefills alone, then decoding, with up to `longest_tokens` cached. Every cell is one prefill
    batch and fits the pool. Contexts that do not occur are better left out: the less there is to be linear in."""
    sizes = (1, 8) if quick else (1, 4, 16)
    parts = (4, 1) if quick else (16, 4, 2, 1)
    longest = min(longest_tokens, limits.context_tokens * 3 // 4, limits.pool_tokens // 2)
    prefixes = (0, longest) if quick else (0, longest // 16, longest // 4, longest)
    contexts = (
        (longest // 32, longest // 2) if quick else (longest // 32, longest // 8, longest // 2, longest)
    )
    batches = (1, 16) if quick else (1, 4, 16, 64)
    cells = {
        Cell(requests, limits.chunk_tokens // part // requests, prefix)
        for requests in sizes
        for part in parts
        for prefix in prefixes
    }
    cells |= {
        Cell(requests, TAIL_TOKENS, context, 16 if quick else 32)
        for requests in {min(batch, limits.running) for batch in batches}
        for context in contexts
    }
    fitting = [cell for cell in cells if cell.extend_tokens > 0 and _fits(cell, limits)]
    return sorted(
        fitting, key=lambda cell: (cell.steps, cell.cached_tokens, cell.requests, cell.extend_tokens)
    )


def _fits(cell: Cell, limits: Limits) -> bool:
    length = cell.cached_tokens + cell.extend_tokens + 1 + cell.steps
    return (
        cell.requests * cell.extend_tokens <= limits.chunk_tokens
        and cell.requests <= limits.running
        and length <= limits.context_tokens - 1
        and cell.requests * (length + limits.page_tokens) <= limits.pool_tokens * 3 // 4
    )


@dataclass(frozen=True, slots=True)
class Timed:
    """A cell as it was measured. The median of the tries counts."""

    cell: Cell
    extends: tuple[tuple[int, int], ...]
    tries_s: tuple[float, ...]

    @property
    def measurement(self) -> Measurement:
        return Measurement(self.extends, self.cell.steps, median(self.tries_s))

    @property
    def spread(self) -> float:
        """Between the fastest try and the slowest, relative to the median."""
        return (max(self.tries_s) - min(self.tries_s)) / median(self.tries_s)


class Replica:
    """A server's /generate, as a client sees it."""

    def __init__(self, session: aiohttp.ClientSession, url: str, rng: Random) -> None:
        self._session, self._url, self._rng = session, url.rstrip("/"), rng
        self.limits = Limits(1, 1, 1, 1, 1)
        self._plug_tokens = 0

    async def connect(self) -> Mapping[str, Any]:
        """Ask what it is, and find out how long a plug must be. Returns what it tells of itself."""
        try:
            async with self._session.get(f"{self._url}/server_info") as response:
                if response.status != 200:
                    raise CalibrationError(
                        f"{self._url}/server_info: HTTP {response.status}; is it an SGLang server?"
                    )
                info = json.loads(await response.read())
        except (aiohttp.ClientError, TimeoutError) as error:
            raise CalibrationError(f"cannot reach {self._url}: {str(error) or 'no answer'}") from None
        except ValueError:
            info = None
        if not isinstance(info, dict):
            raise CalibrationError(f"{self._url}/server_info is no JSON object; is it an SGLang server?")
        self.limits = Limits.of_server(info)
        await self.generate([self.prompt(self.limits.page_tokens + 1)], 2)  # whatever happens only once
        self._plug_tokens = await self._find_plug()
        return info

    def prompt(self, tokens: int) -> list[int]:
        return self._rng.choices(TOKEN_IDS, k=tokens)

    async def generate(
        self, prompts: Sequence[Sequence[int]], output_tokens: int
    ) -> tuple[list[Mapping[str, Any]], float]:
        """What the server says of each of these requests, sent together, and when the last answer was there.

        Answers are streamed, as to most clients: the scheduler hands out each token.
        """
        sampling = {"max_new_tokens": output_tokens, "ignore_eos": True, "temperature": 0.0}
        body = {"input_ids": list(prompts), "sampling_params": sampling, "stream": True}
        told: dict[int, Mapping[str, Any]] = {}
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
                        told[event.get("index", 0)] = event["meta_info"]
        except (aiohttp.ClientError, TimeoutError) as error:
            said = str(error) or "timed out"
            raise CalibrationError(f"{self._url} failed during the measurement: {said}") from None
        except (ValueError, LookupError, TypeError) as error:
            raise CalibrationError(f"{self._url} does not answer as SGLang does: {error!r}") from None
        if len(told) < len(prompts):
            raise CalibrationError(f"{self._url} answered {len(told)} of {len(prompts)} requests")
        return [told[place] for place in range(len(prompts))], time.monotonic()

    async def measure(self, cell: Cell, tries: int) -> Timed:
        """The time of one batch, several times over, each with other prompts behind the same prefixes."""
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
                return Timed(cell, extends, tuple(tries_s))
        raise CalibrationError(
            f"{cell}: answers overtook each other most of the time; is the machine, or the replica, busy?"
        )

    async def _once(
        self, prefixes: Sequence[Sequence[int]], cell: Cell
    ) -> tuple[tuple[tuple[int, int], ...], float]:
        """What the batch's requests computed and found cached, and its time behind a plug."""
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
        """One short request and one token, with nothing before it: what was asked, and the median."""
        times, tokens = [], TAIL_TOKENS
        for _ in range(tries):
            began_s = time.monotonic()
            _, done_s = await self.generate([self.prompt(tokens)], 1)
            times.append(done_s - began_s)
        return ((tokens, 0),), median(times)

    async def _find_plug(self) -> int:
        """Tokens of a prompt, in whole chunks, that takes `PLUG_S`; or the longest that there can be."""
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
    """All that is written to the file; see the module. Raises CalibrationError."""
    tries = 3 if quick else 5
    started_unix_s = time.time()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
        replica = Replica(session, url, Random(seed))
        info = await replica.connect()
        cells, timed = grid(replica.limits, longest_tokens, quick=quick), []
        for place, cell in enumerate(cells):
            timed.append(await replica.measure(cell, tries))
            took = timed[-1].measurement.seconds
            say(f"[{place + 1}/{len(cells)}] {cell}: {took * 1e3:.1f} ms, spread {timed[-1].spread:.0%}")
        crowd = Cell(CROWD * replica.limits.running, CROWD_TOKENS, steps=TAIL_TOKENS)
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


def simulated_crowd(crowd: Cell, model: CostModel, limits: Limits) -> tuple[float, int]:
    """How long the simulator takes for these requests, all there at once, and in how many steps."""
    settings = Settings(
        kv_tokens=limits.pool_tokens,
        page_tokens=limits.page_tokens,
        max_running=limits.running,
        chunked_prefill_tokens=limits.chunk_tokens,
    )
    replica = SimReplica(FairQueue(Fcfs(), Linear()), model, settings, events=False)
    for place in range(crowd.requests):
        first, output = place * crowd.extend_tokens, 1 + crowd.steps
        prompt = array("I", range(first, first + crowd.extend_tokens)).tobytes()
        replica.arrive(SimRequest(str(place), "calibrate", prompt, output, output), 0.0)
    now_s = 0.0
    while replica.next_s < inf:
        now_s = replica.next_s
        replica.advance(now_s)
    return now_s, replica.meters.steps


def under_load(model: Fitted, scheduling_s: float) -> Fitted:
    """`model` with the scheduler's time in each step."""
    return replace(
        model,
        prefill_base_s=model.prefill_base_s + scheduling_s,
        decode_base_s=model.decode_base_s + scheduling_s,
    )


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="sglang-fair calibrate",
        description=(__doc__ or "").split("\n\n")[0],
        epilog="The replica must be idle: whatever else it does is counted.",
    )
    parser.add_argument("url", metavar="URL", help="of an SGLang server, http://HOST:PORT")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("calibration.json"),
        metavar="FILE",
        help="where to write the cost model (default: %(default)s)",
    )
    parser.add_argument(
        "--context",
        type=int,
        default=LONGEST_TOKENS,
        metavar="TOKENS",
        help="the longest context that matters to your traffic (default: %(default)s)",
    )
    parser.add_argument("--quick", action="store_true", help="a small grid and fewer tries")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (default: %(default)s)")
    return parser.parse_args(arguments)


def check(options: argparse.Namespace) -> None:
    """Raises ValueError for what cannot be meant, before minutes of measuring."""
    if not options.url.startswith(("http://", "https://")):
        raise ValueError(f"the URL must begin with http:// or https://, not be {options.url!r}")
    if options.context < SHORTEST_TOKENS:
        raise ValueError(f"--context must be at least {SHORTEST_TOKENS} tokens, not {options.context}")
    if not options.out.parent.is_dir():
        raise ValueError(f"--out: there is no folder {options.out.parent}")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(sys.argv[1:] if arguments is None else arguments)

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    try:
        check(options)
        found = asyncio.run(
            calibrate(
                options.url,
                longest_tokens=options.context,
                quick=options.quick,
                seed=options.seed,
                say=say,
            )
        )
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    except (CalibrationError, OSError, ValueError) as error:
        say(f"sglang-fair calibrate: {error}")
        return 2 if isinstance(error, ValueError) else 1
    except KeyboardInterrupt:
        return 130
    say(summary(found))
    print(options.out)
    return 0


def summary(found: Mapping[str, Any]) -> str:
    """What people want to know of a calibration, in a few lines."""
    lines = ["fitted, in microseconds:"]
    for name, value in found["cost_model"].items():
        if name != "kind":
            lines.append(f"  {name.removesuffix('_s').replace('_', ' '):22} {value * 1e6:12.4g}")
    for kind in ("prefill", "decode"):
        off = found["fit"][kind]
        lines.append(
            f"{kind}: median error {off['median']:.1%}, 90th percentile {off['p90']:.1%}, worst {off['worst']:.1%}"
        )
    if found["fit"]["spread_of_tries"] > BUSY_SPREAD:
        lines.append(
            "equal measurements differ that much: the machine is busy, and none of this is to be trusted"
        )
    lines.append(f"scheduling under load, in both bases: {found['scheduling_s'] * 1e6:.0f} a step")
    lines.append(
        f"spread between tries {found['fit']['spread_of_tries']:.0%}, way there and back {found['hop_s'] * 1e3:.1f} ms"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
