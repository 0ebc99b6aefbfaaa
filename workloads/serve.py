"""Load on any OpenAI-compatible endpoint from clients with names of their own, and how fairly each was served.

    sglang-fair bench serve --url http://127.0.0.1:8000 --workload single --clients a:rate=2 b:rate=8 --duration 60
    sglang-fair bench serve --url http://host --api chat --identity smg --workload tot-s1 --clients 3 --rate 0.2
    sglang-fair bench serve --url http://host --workload single --clients 4 --concurrency 8      # closed loop

Open loop: programs arrive at their times whatever the server does, and latency counts from when a request was
due. Closed loop: each client keeps so many programs under way. The warm-up is driven and recorded, and left out
of the report. Ctrl-C ends the load, and the report is of what there is by then.

Answers have their full length (`ignore_eos`, but with --stop-at-eos) and are counted as they come
(`continuous_usage_stats`). Neither field is OpenAI's: SGLang and vLLM know them, a strict server refuses them.

Exit code 0, 1 if no request was answered, 2 for bad input or an endpoint that is not there, 130 after Ctrl-C.
"""

import argparse
import asyncio
import json
import math
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from sglang_fair.common.files import read_json
from sglang_fair.common.provenance import machine, versions
from sglang_fair.core.cost import Cost, describe, make_cost
from workloads import wire
from workloads.clients import SCENARIOS, SMALL, Scale, Texts
from workloads.datasets import read_articles, read_codec, read_questions
from workloads.driver import Driver, Endpoint
from workloads.endpoints import HEADER, IDENTITIES, EndpointError, find_model, identity, read_keys
from workloads.fairness_report import FairnessReport, fairness_report, render
from workloads.load import (
    SINGLE,
    TRACE,
    WORKLOADS,
    Load,
    Traffic,
    load,
    load_trace,
    parse_clients,
    read_trace,
)
from workloads.load import told as told_traffic
from workloads.programs import TextCodec
from workloads.programs.prose import Articles, WordProblems
from workloads.records import Manifest, Records, Run
from workloads.session import Plan, SessionProgress
from workloads.terminal import FILE_COLUMNS, progress_line

TOKEN_STEP_S = 0.1
"""Between recorded tokens of an answer: windows are hundreds of times as long."""
LINE_S = 10.0
"""Between two lines about progress, where there is no terminal."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="sglang-fair bench serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    say = parser.add_argument
    say("--url", required=True, help="base URL, without /v1")
    say(
        "--api",
        choices=list(wire.PATHS),
        default=wire.COMPLETIONS,
        help="completions and chat are OpenAI's, generate SGLang's (default: %(default)s)",
    )
    say("--model", help="default: the endpoint's only one")
    say(
        "--api-key", metavar="KEY", help="sent with every request, or with those of clients without their own"
    )
    say(
        "--identity",
        metavar="PLACE",
        default="fair",
        help=f"where a client's name goes: {', '.join(IDENTITIES)}, or {HEADER}NAME (default: %(default)s)",
    )
    say(
        "--keys", type=Path, metavar="FILE", help="JSON object: each client's API key, for --identity api-key"
    )
    say("--workload", choices=WORKLOADS, default=SINGLE, metavar="NAME", help=", ".join(WORKLOADS))
    say(
        "--clients",
        nargs="+",
        metavar="CLIENT",
        help="a number, or NAME[:KEY=VALUE,...] with rate, concurrency, weight, input, output, prefix; "
        "in a scenario names that begin with bad misbehave (default: 4)",
    )
    say("--rate", type=float, metavar="R", help="open loop: programs a second of each client (trace: of all)")
    say("--concurrency", type=int, metavar="N", help="closed loop: programs under way of each client")
    say("--cv", type=float, default=1.0, help="variation of the gaps between programs; 0: even (default: 1)")
    say("--input", type=int, default=256, metavar="TOKENS", help=f"of {SINGLE} (default: %(default)s)")
    say("--output", type=int, default=64, metavar="TOKENS", help=f"of {SINGLE} (default: %(default)s)")
    say("--prefix", type=int, default=0, metavar="TOKENS", help=f"of {SINGLE}: shared by a client's requests")
    say(
        "--paper-scale",
        action="store_true",
        help="scenarios with DLPM's lengths; the default suits two cores",
    )
    say(
        "--questions",
        type=Path,
        metavar="FILE",
        help="of tot: JSON lines with `question` (default: made from the seed)",
    )
    say(
        "--articles",
        type=Path,
        metavar="PATH",
        help="of judge: a folder of *.txt, or a file (default: made from the seed)",
    )
    say(
        "--trace",
        metavar="FILE",
        help="arena or mooncake JSON lines, a ServeGen folder, or one of these names",
    )
    say(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="send token ids, exact lengths; else text, 4 letters a token",
    )
    say("--duration", type=float, default=60.0, metavar="S", help="measured seconds (default: %(default)g)")
    say("--warm-up", type=float, default=10.0, metavar="S", help="before those (default: %(default)g)")
    say("--drain", type=float, default=30.0, metavar="S", help="longest wait for the last answers")
    say("--timeout", type=float, default=600.0, metavar="S", help="of one request (default: %(default)g)")
    say("--connections", type=int, default=1024, metavar="N", help="of each client (default: %(default)s)")
    say("--cost", default="linear", help="units of service: linear, profiled, quadratic:d=1000, ...")
    say(
        "--stop-at-eos",
        action="store_true",
        help="answers may end early (default: they have full length, by `ignore_eos`, which not every server knows)",
    )
    say("--temperature", type=float, default=0.0)
    say("--seed", default="0")
    say("--records", type=Path, metavar="FILE", help="write every request as a line of JSON")
    say("--json", type=Path, metavar="FILE", help="write the last line to FILE too")
    given = parser.parse_args(arguments)
    if (given.workload == TRACE) != (given.trace is not None):
        parser.error("--workload trace and --trace FILE go together")
    app = SCENARIOS[given.workload].app if given.workload in SCENARIOS else ""
    if (given.questions and app != "tot") or (given.articles and app != "judge"):
        parser.error("--questions are for tot-s1 and tot-s2, --articles for judge-s1 and judge-s2")
    return given


@dataclass(frozen=True, slots=True)
class Case:
    """Everything that decides a load."""

    endpoint: Endpoint
    load: Load
    plan: Plan
    warm_up_s: float
    cost: Cost
    manifest: Manifest
    records: Path | None

    @property
    def closed_loop(self) -> bool:
        return bool(self.load.at_once)


def case_of(given: argparse.Namespace) -> Case:
    """The load that the command line asks for. Raises ValueError, OSError, EndpointError."""
    if not (0 <= given.warm_up < math.inf and 0 < given.duration < math.inf and given.drain >= 0):
        raise ValueError("--warm-up and --drain must not be negative, --duration must be positive")
    cost = make_cost(given.cost, read=read_json)
    codec = read_codec(given.tokenizer) if given.api != wire.CHAT else TextCodec()
    traffic = Traffic(
        given.workload,
        rate=given.rate,
        concurrency=given.concurrency,
        cv=given.cv,
        input=given.input,
        output=given.output,
        prefix=given.prefix,
        scale=Scale() if given.paper_scale else SMALL,
        seed=given.seed,
    )
    until_s = given.warm_up + given.duration
    if given.workload == TRACE:
        specs = parse_clients(given.clients, TRACE) if given.clients else ()
        loaded = load_trace(read_trace(given.trace, traffic, until_s), specs, traffic, codec)
    else:
        texts = Texts(
            read_questions(given.questions) if given.questions else WordProblems(),
            read_articles(given.articles) if given.articles else Articles(),
        )
        loaded = load(parse_clients(given.clients or ["4"], given.workload), traffic, codec, texts)
    names = [client.name for client in loaded.clients]
    keys = read_keys(given.keys) if given.keys else None
    named = identity(given.identity, names, keys)
    key = given.api_key or next(iter(named.get("api_keys", {}).values()), None)
    model = asyncio.run(find_model(given.url, given.model, key))
    if model is None and given.api != wire.GENERATE:
        raise EndpointError(f"{given.url} does not list its models: name one with --model")
    manifest = Manifest(
        workload=given.workload,
        scheduler=given.url,
        clients=loaded.told,
        duration_s=until_s,
        seed=given.seed,
        extend_weight=cost.extend_weight,
        output_weight=cost.output_weight,
        case={
            "api": given.api,
            "model": model,
            "identity": given.identity,
            "traffic": told_traffic(traffic),
            "trace": given.trace,
            "texts": str(given.questions or given.articles or "") or None,
            "warm_up_s": given.warm_up,
            "drain_s": given.drain,
            "timeout_s": given.timeout,
            "connections": given.connections,
            "cost": describe(cost),
            "token_ids": not isinstance(codec, TextCodec),
        },
        versions=versions(),
        machine=machine(),
        started_unix_s=datetime.now(UTC).timestamp(),
    )
    endpoint = Endpoint(
        given.url,
        given.api,
        model or "default",
        ignore_eos=not given.stop_at_eos,
        temperature=given.temperature,
        timeout_s=given.timeout,
        api_key=given.api_key,
        **named,
    )
    plan = Plan(
        until_s,
        at_once=loaded.at_once,
        drain_s=given.drain,
        connections_per_client=given.connections,
        token_step_s=TOKEN_STEP_S,
    )
    return Case(endpoint, loaded, plan, given.warm_up, cost, manifest, given.records)


@dataclass(slots=True)
class Watch:
    """Shows where a run stands: in place on a terminal, else in a line every `LINE_S`."""

    plan: Plan
    console: Console
    live: Live
    next_s: float = LINE_S

    def __call__(self, progress: SessionProgress) -> None:
        line = Text(progress_line(progress, self.plan))
        if self.console.is_terminal:
            self.live.update(line)
        elif progress.now_s >= self.next_s:
            self.console.print(line)
            self.next_s = progress.now_s + LINE_S


async def drive(case: Case, console: Console) -> tuple[Run, bool]:
    """The run, and whether it was interrupted."""
    interrupted = False
    with (
        Records(case.records, case.manifest) as records,
        Live(Text(""), console=console, transient=True, refresh_per_second=2) as live,
    ):
        driver = Driver(
            case.endpoint,
            case.load.clients,
            case.plan,
            records,
            watch=Watch(case.plan, console, live),
        )

        def stop() -> None:
            nonlocal interrupted
            interrupted = True
            driver.stop()
            loop.remove_signal_handler(signal.SIGINT)  # a second one ends the program

        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, stop)
        try:
            await driver.run()
        finally:
            with suppress(ValueError, RuntimeError):
                loop.remove_signal_handler(signal.SIGINT)
        return records.run, interrupted


def last_line(case: Case, report: FairnessReport, run: Run, *, interrupted: bool) -> str:
    """The load for programs, in one line."""
    told = {
        "bench": "serve",
        "url": case.endpoint.url,
        "workload": case.manifest.workload,
        "seed": case.manifest.seed,
        "case": case.manifest.case,
        "loop": "closed" if case.closed_loop else "open",
        "interrupted": interrupted,
        "clients_asked": case.manifest.clients,
        "report": report.to_json(),
        "versions": run.manifest.versions,
        "machine": run.manifest.machine,
    }
    return json.dumps(told, separators=(",", ":"), default=str)


def main(arguments: Sequence[str] | None = None) -> int:
    """Progress and tables on stderr; the result is the last line of stdout."""
    given = parse(arguments)
    console = Console(stderr=True, width=None if sys.stderr.isatty() else FILE_COLUMNS)
    interrupted = False
    try:
        case = case_of(given)
        run, interrupted = asyncio.run(drive(case, console))
        report = fairness_report(run, warm_up_s=case.warm_up_s, cost=case.cost, weights=case.load.weights)
        console.print(render(report, closed_loop=case.closed_loop))
        line = last_line(case, report, run, interrupted=interrupted)
        print(line, flush=True)
        if given.json:
            given.json.write_text(line + "\n", encoding="utf-8")
    except (ValueError, OSError, EndpointError) as error:
        print(f"sglang-fair bench serve: {error}", file=sys.stderr)
        return 130 if interrupted else 2
    except KeyboardInterrupt:
        return 130
    if interrupted:
        return 130
    return 0 if report.ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
