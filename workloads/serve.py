"""`sglang-fair bench serve`: load on any OpenAI-compatible endpoint, and how fairly each client was served.

Answers have their full length (`ignore_eos`, unless --stop-at-eos is given) and are counted as they come
(`continuous_usage_stats`). Neither field is OpenAI's: SGLang and vLLM know them, a strict server refuses them.
/v1/responses and /v1/messages have no such fields: there answers end where the model ends them.
"""

import asyncio
import math
import secrets
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from rich.console import Console

from sglang_fair.bench import print_line
from sglang_fair.core.cost import Cost, describe, make_cost
from sglang_fair.settings.commands import Option, command, run
from workloads import wire
from workloads.driver import Driver, Endpoint
from workloads.endpoints import HEADER, IDENTITIES, EndpointError, find_model, identity, read_keys
from workloads.fairness_report import fairness_report, render
from workloads.load import ClientLoad, LoadOptions, RunOption, read_codec
from workloads.programs import TextCodec
from workloads.records import Manifest, Records, stamp
from workloads.session import Plan
from workloads.terminal import make_console, progress_view

NAME = "sglang-fair bench serve"

TOKEN_STEP_S = 0.1
"""Interval between recorded tokens of an answer; the report's windows are hundreds of times as long."""


EndpointOption = partial(Option, rich_help_panel="The endpoint")


@dataclass(frozen=True, kw_only=True)
class ServeOptions(LoadOptions):
    url: Annotated[str, EndpointOption(help="Base URL, without /v1.")]
    api: Annotated[
        Literal["generate", "completions", "chat", "responses", "messages", "embeddings"],
        EndpointOption(help="generate is SGLang's, messages is Anthropic's, the others are OpenAI's."),
    ] = "completions"
    model: Annotated[str | None, EndpointOption(help="[default: the endpoint's only one]")] = None
    api_key: Annotated[
        str | None,
        EndpointOption(
            metavar="KEY", help="Sent with every request, or with those of clients without their own."
        ),
    ] = None
    place: Annotated[
        str,
        EndpointOption(
            "--identity",
            metavar="PLACE",
            help=f"Where a client's name goes: {', '.join(IDENTITIES)}, or {HEADER}NAME.",
        ),
    ] = "fair"
    keys: Annotated[
        Path | None,
        EndpointOption(
            metavar="FILE", help="JSON object with each client's API key, for --identity api-key."
        ),
    ] = None
    duration: Annotated[float, RunOption(metavar="S", help="Measured seconds.")] = 60.0
    warm_up: Annotated[float, RunOption(metavar="S", help="Before those.")] = 10.0
    drain: Annotated[float, RunOption(metavar="S", help="Longest wait for the last answers.")] = 30.0
    timeout: Annotated[float, RunOption(metavar="S", help="Of one request.")] = 600.0
    seed: Annotated[
        str,
        RunOption(
            help="Of the programs and their arrivals. [default: drawn, so that a cache holds no prompt of an "
            "earlier run]",
            show_default=False,
        ),
    ] = ""
    connections: Annotated[int, RunOption(metavar="N", help="Of each client.")] = 1024
    cost: Annotated[str, RunOption(help="Units of service: linear, profiled, quadratic:d=1000, ...")] = (
        "linear"
    )
    stop_at_eos: Annotated[
        bool,
        RunOption(
            "--stop-at-eos",
            help="Answers may end early. By default they have full length, by `ignore_eos`, which not every "
            "server knows.",
        ),
    ] = False
    temperature: Annotated[float, RunOption(help="Of sampling.")] = 0.0
    records: Annotated[
        Path | None, RunOption(metavar="FILE", help="Write every request as a line of JSON.")
    ] = None
    json_file: Annotated[
        Path | None, RunOption("--json", metavar="FILE", help="Write the last line to FILE too.")
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "seed", self.seed or secrets.token_hex(4))
        if not (0 <= self.warm_up < math.inf and 0 < self.duration < math.inf and self.drain >= 0):
            raise ValueError("--warm-up and --drain must not be negative, --duration must be positive")

    @property
    def until_s(self) -> float:
        """When arrivals end."""
        return self.warm_up + self.duration

    @property
    def prices(self) -> Cost:
        return make_cost(self.cost)

    def endpoint(self, names: Sequence[str]) -> Endpoint:
        """Raises ValueError, OSError and EndpointError."""
        named = identity(self.place, names, read_keys(self.keys) if self.keys else None)
        key = self.api_key or next(iter(named.get("api_keys", {}).values()), None)
        served = asyncio.run(find_model(self.url, self.model, key))
        if served is None and self.api != wire.GENERATE:
            raise EndpointError(f"{self.url} does not list its models: name one with --model")
        return Endpoint(
            self.url,
            self.api,
            served or "default",
            ignore_eos=not self.stop_at_eos,
            temperature=self.temperature,
            timeout_s=self.timeout,
            api_key=self.api_key,
            **named,
        )

    def manifest(self, loaded: ClientLoad, model: str, *, token_ids: bool) -> Manifest:
        case = {
            "api": self.api,
            "model": model if model != "default" else None,
            "identity": self.place,
            "traffic": self.to_json(),
            "trace": self.trace,
            "texts": str(self.questions or self.articles or "") or None,
            "warm_up_s": self.warm_up,
            "drain_s": self.drain,
            "timeout_s": self.timeout,
            "connections": self.connections,
            "cost": describe(self.prices),
            "token_ids": token_ids,
        }
        return Manifest(
            workload=self.workload,
            scheduler=self.url,
            clients=loaded.asked,
            duration_s=self.until_s,
            seed=self.seed,
            extend_weight=self.prices.extend_weight,
            output_weight=self.prices.output_weight,
            case=case,
            **stamp(),
        )


def serve(given: ServeOptions) -> int:
    """Load any OpenAI-compatible endpoint from several clients, and report how fairly each was served.

    \b
    sglang-fair bench serve --url http://127.0.0.1:8000 --clients a:rate=2 b:rate=8 --duration 60
    sglang-fair bench serve --url http://host --api chat --identity smg --workload tot-s1 --clients 3 --rate 0.2
    sglang-fair bench serve --url http://host --clients 4 --concurrency 8      # closed loop

    Open loop (--rate): programs arrive at their times whatever the server does, and latency counts from when a
    request was due. Closed loop (--concurrency): each client keeps so many programs under way. The warm-up is
    driven and recorded, and left out of the report. Ctrl-C ends the load, and the report is of what there is by
    then. Progress and tables go to stderr; the result is the last line of stdout.

    Exit code 0, 1 if no request was answered, 2 for bad input or an endpoint that is not there, 130 after Ctrl-C.
    """
    prices, codec = given.prices, TextCodec() if given.api in wire.OF_CHATS else read_codec(given.tokenizer)
    loaded = given.load(codec, given.until_s)
    endpoint = given.endpoint([client.name for client in loaded.clients])
    manifest = given.manifest(loaded, endpoint.model, token_ids=not isinstance(codec, TextCodec))
    plan = Plan(
        given.until_s,
        at_once=loaded.at_once,
        drain_s=given.drain,
        connections_per_client=given.connections,
        token_step_s=TOKEN_STEP_S,
    )
    console, closed_loop = make_console(stderr=True), bool(loaded.at_once)
    interrupted = False
    try:
        with Records(given.records, manifest) as records:
            interrupted = asyncio.run(drive(endpoint, loaded, plan, records, console))
        report = fairness_report(records.run, warm_up_s=given.warm_up, cost=prices, weights=loaded.weights)
        console.print(render(report, closed_loop=closed_loop))
        result = {
            "bench": "serve",
            "url": given.url,
            "workload": given.workload,
            "seed": given.seed,
            "case": manifest.case,
            "loop": "closed" if closed_loop else "open",
            "interrupted": interrupted,
            "clients_asked": manifest.clients,
            "report": report.to_json(),
            "versions": manifest.versions,
            "machine": manifest.machine,
        }
        print_line(result, given.json_file)
    except (ValueError, OSError) as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return 130 if interrupted else 2
    if interrupted:
        return 130
    return 0 if report.ok else 1


async def drive(
    endpoint: Endpoint, loaded: ClientLoad, plan: Plan, records: Records, console: Console
) -> bool:
    """Drive the load. Returns whether Ctrl-C ended it."""
    interrupted = False
    with progress_view(console, plan) as watch:
        driver = Driver(endpoint, loaded.clients, plan, records, watch=watch)

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
    return interrupted


def repeated(option: str, arguments: Sequence[str]) -> list[str]:
    """The arguments with `option a b c` written as `option a option b option c`, which is what Typer reads."""
    written: list[str] = []
    takes = False
    for word in arguments:
        if word.startswith("-"):
            takes = word == option
        elif takes and written[-1] != option:
            written.append(option)
        written.append(word)
    return written


def main(arguments: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    refused = (ValueError, OSError, EndpointError)
    return run(command(ServeOptions, serve, refused), NAME, repeated("--clients", words))


if __name__ == "__main__":
    sys.exit(main())
