"""One scenario against a running endpoint: our cluster, one replica, or any OpenAI server.

python -m workloads tot-s1 --url http://127.0.0.1:8000 --rate 0.2 --duration 30 --tokenizer DIR
python -m workloads judge-s1 --url https://host --kind chat --model NAME --articles FOLDER --paper-scale
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from workloads import wire
from workloads.clients import SCENARIOS, Scale, Texts
from workloads.compare.command import FILE_COLUMNS, codec_of
from workloads.compare.runs import SMALL, machine, progress_line, versions
from workloads.datasets import read_articles, read_questions
from workloads.driver import Driver, Endpoint, Plan
from workloads.measures import summarize
from workloads.medians import rows
from workloads.programs import TextCodec
from workloads.programs.prose import Articles, WordProblems
from workloads.records import Manifest, Records
from workloads.report import client_table, comparison_table


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m workloads", description="Run one scenario, print its report."
    )
    say = parser.add_argument
    say("scenario", choices=list(SCENARIOS))
    say("--url", required=True, help="base URL of the endpoint")
    say("--kind", choices=list(wire.PATHS), default=wire.GENERATE)
    say("--model", default="default")
    say("--api-key")
    say("--rate", type=float, default=0.2, metavar="R", help="programs a second of each client")
    say("--cv", type=float, default=1.0, help="coefficient of variation of the gaps between programs")
    say("--duration", type=float, default=30.0, metavar="S", help="seconds of arrivals")
    say("--programs", type=int, metavar="N", help="most programs of each client")
    say("--drain", type=float, metavar="S", help="longest wait after the last arrival (default: for all)")
    say("--good-clients", type=int, default=SMALL.good_clients)
    say("--paper-scale", action="store_true", help="DLPM's lengths; the default suits two cores")
    say("--questions", type=Path, metavar="FILE", help="JSON lines with `question`; else made from the seed")
    say("--articles", type=Path, metavar="PATH", help="folder of *.txt, or a file; else made from the seed")
    say(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="send token ids by this model's tokenizer.json; else text",
    )
    say("--stop-at-eos", action="store_true", help="answers may end early (default: they have full length)")
    say("--temperature", type=float, default=0.0)
    say("--replica", action="append", default=[], metavar="URL", help="whose /fair to sample (repeatable)")
    say("--seed", default="0")
    say("--records", type=Path, metavar="FILE", help="write every request as JSON lines")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run, report. Status 1 if a request failed."""
    given = parse(argv)
    console = Console(width=None if sys.stdout.isatty() else FILE_COLUMNS)
    try:
        codec = codec_of(given.tokenizer) if given.kind != wire.CHAT else TextCodec()
        scale = Scale() if given.paper_scale else SMALL
        clients = SCENARIOS[given.scenario].clients(
            scale=replace(scale, good_clients=given.good_clients),
            rate_per_s=given.rate,
            codec=codec,
            cv=given.cv,
            seed=given.seed,
            texts=Texts(
                read_questions(given.questions) if given.questions else WordProblems(),
                read_articles(given.articles) if given.articles else Articles(),
            ),
        )
        plan = Plan(given.duration, given.programs, drain_s=given.drain)
        endpoint = Endpoint(
            given.url,
            given.kind,
            given.model,
            ignore_eos=not given.stop_at_eos,
            temperature=given.temperature,
            api_key=given.api_key,
        )
    except (OSError, ValueError) as error:
        print(f"workloads: {error}", file=sys.stderr)
        return 2
    manifest = Manifest(
        workload=given.scenario,
        scheduler=given.url,
        clients={client.name: {"well_behaved": client.well_behaved, "app": client.app} for client in clients},
        duration_s=given.duration,
        programs_per_client=given.programs,
        workers=len(given.replica) or None,
        seed=given.seed,
        case={"scale": asdict(scale), "rate_per_s": given.rate, "cv": given.cv},
        versions=versions(),
        machine=machine(),
        started_unix_s=time.time(),
    )
    with (
        Records(given.records, manifest) as records,
        Live(Text(""), console=console, transient=True, refresh_per_second=2) as live,
    ):
        driver = Driver(
            endpoint,
            clients,
            plan,
            records,
            replicas={f"r{place}": url for place, url in enumerate(given.replica)},
            watch=lambda progress: live.update(Text(progress_line(progress, plan))),
        )
        asyncio.run(driver.run())
    summary = summarize(records.run)
    console.print(client_table(summary))
    console.print(comparison_table(rows([summary]), [summary]))
    failed = [record.error for record in records.run.requests if record.outcome == "failed"]
    for text in sorted({str(text) for text in failed})[:5]:
        print(f"workloads: {text}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
