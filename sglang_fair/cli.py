"""`sglang-fair`: the commands. What a command needs is imported when it runs, so that --help is quick."""

import json
import os
import sys
import time
from typing import Annotated, Any, NamedTuple, NoReturn

import typer

from sglang_fair.common.version import VERSION
from sglang_fair.settings.commands import run_app

app = typer.Typer(
    name="sglang-fair",
    help="Fair, locality-aware serving of LLMs to many clients: DLPM inside SGLang, D2LPM in front of it.",
    epilog="Start with: sglang-fair cluster",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"sglang-fair {VERSION}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit."),
    ] = False,
) -> None:
    """What stands before a command."""


class Program(NamedTuple):
    """A command with a process of its own: this one goes on as `python -m module`, which reads the arguments."""

    module: str
    help: str


PROGRAMS = {
    "cluster": Program(
        "sglang_fair.cluster", "Start replicas, router and gateway, and keep them running until Ctrl-C."
    ),
    "replica": Program("sglang_fair.engines.replica", "Run one SGLang server with the fair scheduler."),
    "router": Program("router", "Run the router alone."),
    "gateway": Program("router.gateway", "Run a gateway alone."),
    "picker": Program(
        "router.picker",
        "Run an endpoint picker: a gateway of another maker, as Envoy, asks it where each request goes.",
    ),
    "feeder": Program(
        "router.feeder",
        "Have the requests of batches answered; a cluster with --batches starts one by itself.",
    ),
    "dashboard": Program(
        "sglang_fair.dashboard", "Serve the page for operators; a cluster starts one by itself."
    ),
    "agent": Program(
        "sglang_fair.agent",
        "Have one replica load the models that the router names; a cluster with --swap starts agents.",
    ),
    "top": Program("sglang_fair.dashboard.top", "Show on the terminal what each client gets, and who waits."),
    "tenants": Program(
        "sglang_fair.tenants", "Who may ask: make, list, rotate and remove tenants and their keys."
    ),
    "models": Program("sglang_fair.models", "List the models that come with the package, or prepare one."),
    "keys": Program("router.keys", "Make the keys with which router, gateways and replicas know each other."),
    "install": Program(
        "sglang_fair.install",
        "Install SGLang and what it needs: without a GPU (cpu), or with its kernels (cuda).",
    ),
    "doctor": Program(
        "sglang_fair.install.doctor",
        "Say whether SGLang, or a wheel of it, and all else here are fit for a cluster, and what is to be done.",
    ),
    "compare": Program("workloads.compare", "Compare schedulers and placements on workload programs."),
    "simulate": Program(
        "workloads.simulation.command",
        "Compare schedulers, quanta and numbers of replicas on modelled GPUs, in virtual time.",
    ),
    "reproduce": Program(
        "workloads.experiments.command",
        "Run the papers' experiments in the simulator: tables and figures beside the published ones.",
    ),
    "limits": Program(
        "workloads.served",
        "Print limits for --throttle, from the records of a run: what users need in a busy minute.",
    ),
    "calibrate": Program(
        "sglang_fair.calibration",
        "Measure a replica and fit the cost model that emulated and simulated replicas use.",
    ),
}

BENCHES = {
    "scheduler": Program(
        "sglang_fair.engines.bench.scheduler",
        "Time one turn of the scheduler, by policy, queue length, clients and prompt length.",
    ),
    "router": Program(
        "sglang_fair.bench.router",
        "Time one placement decision, by placement, prompt length and workers, and the tree's events and memory.",
    ),
    "queue": Program(
        "sglang_fair.bench.queue",
        "Time a plan of queues of groups, and a request's arrival and pull among many that wait.",
    ),
    "gateway": Program(
        "sglang_fair.bench.gateway",
        "Time the way through the gateway, in front of an engine that answers at once.",
    ),
    "isolation": Program(
        "workloads.isolation.command",
        "Flood emulated A100 from one client, and see what the others get, beside stock SGLang behind sglang-router.",
    ),
    "serve": Program(
        "workloads.serve",
        "Load any OpenAI-compatible endpoint from several clients, and report how fairly each was served.",
    ),
}
"""The same below `sglang-fair bench`."""


bench = typer.Typer(
    help="Measure what scheduling and placement cost, and how fair an endpoint is.", no_args_is_help=True
)
app.add_typer(bench, name="bench")

workers = typer.Typer(
    help="Replicas of a running cluster on this machine: list, add, drain, swap.", no_args_is_help=True
)
app.add_typer(workers, name="workers")


def _register(group: typer.Typer, name: str, program: Program) -> None:
    def become() -> None:
        _become(program.module, [])

    group.command(name, help=program.help)(become)


for _name, _program in PROGRAMS.items():
    _register(app, _name, _program)
for _name, _program in BENCHES.items():
    _register(bench, _name, _program)


ClusterUrl = Annotated[
    str, typer.Option("--cluster", metavar="URL", help="Address of the cluster's gateway.")
]
ReplicaName = Annotated[str, typer.Argument(help="As `list` shows it.")]
AsJson = Annotated[bool, typer.Option("--json", help="One line of JSON.")]


@workers.command("list")
def workers_list(
    cluster: ClusterUrl = "http://127.0.0.1:8000",
    as_json: AsJson = False,
) -> None:
    """Show the replicas that the cluster has started."""
    replicas = _change_workers(cluster, {"do": "list"})["workers"]
    if as_json:
        print(json.dumps(replicas))
        return
    for row in replicas:
        print(
            f"{row['name']:6} {row['state']:10} {row['url']:28} pid {row['pid'] or '-':<8} {row['model']}".rstrip()
        )


@workers.command("add")
def workers_add(
    cluster: ClusterUrl = "http://127.0.0.1:8000",
    model: Annotated[
        str | None,
        typer.Option(help="Which of several models it has; without it, the one that the fewest have."),
    ] = None,
) -> None:
    """Start one more replica with the cluster's settings; returns when it gets requests."""
    row = _change_workers(cluster, {"do": "add"} | ({} if model is None else {"model": model}))
    print(f"{row['name']} is up at {row['url']}, pid {row['pid']}")


@workers.command("swap")
def workers_swap(
    name: ReplicaName,
    model: Annotated[str, typer.Argument(help="As clients call it; the replica must be able to load it.")],
    cluster: ClusterUrl = "http://127.0.0.1:8000",
) -> None:
    """Have a replica load another model; returns when it serves that."""
    row = _change_workers(cluster, {"do": "swap", "name": name, "model": model})
    print(f"{row['name']} has {row['model']}")


@workers.command("drain")
def workers_drain(
    name: ReplicaName,
    cluster: ClusterUrl = "http://127.0.0.1:8000",
) -> None:
    """Send a replica nothing new, let it finish, stop it; returns when it has stopped."""
    row = _change_workers(cluster, {"do": "drain", "name": name})
    print(f"{row['name']} has finished and is stopped")


def _change_workers(cluster: str, request: dict[str, Any]) -> dict[str, Any]:
    from urllib.parse import urlsplit

    from sglang_fair.cluster import control

    try:
        port = urlsplit(cluster).port
    except ValueError:
        port = None
    if port is None:
        _fail(f"--cluster must be the address of a gateway, as http://127.0.0.1:8000, not {cluster!r}")
    try:
        return control.ask(
            control.socket_path(port), request, lambda text: print(text, file=sys.stderr, flush=True)
        )
    except (control.NoCluster, control.Refused) as error:
        _fail(str(error), 1)
    except KeyboardInterrupt:
        _fail("the cluster carries on with it; `sglang-fair workers list` shows the state", 130)


@app.command()
def status(
    gateway: Annotated[str, typer.Argument(help="Address of a gateway.")] = "http://127.0.0.1:8000",
    watch: Annotated[
        float, typer.Option(metavar="SECONDS", help="Show again every so many seconds; 0: once.", min=0)
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Show what each client was served, who waits, and the policy's counter of each client."""
    from rich.console import Console

    from sglang_fair.cluster import status as books

    console = Console(width=None if sys.stdout.isatty() else 140)
    while True:
        try:
            found = books.read(gateway)
        except books.Unreachable as error:
            _fail(str(error), 1)
        if as_json:
            print(json.dumps(found), flush=True)
        else:
            if watch and console.is_terminal:
                console.clear()
            console.print(books.render(found))
        if not watch:
            return
        try:
            time.sleep(watch)
        except KeyboardInterrupt:
            return


@app.command()
def explain(
    request: Annotated[str, typer.Argument(help="The id in its answer: x-request-id or x-fair-request-id.")],
    gateway: Annotated[
        str, typer.Option(metavar="URL", help="Address of a gateway.")
    ] = "http://127.0.0.1:8000",
    as_json: AsJson = False,
) -> None:
    """Say why a request waited, and why it was served where it was. Tenants ask with their key in OPENAI_API_KEY,
    operators with theirs."""
    from sglang_fair.cluster import explain as explained
    from sglang_fair.cluster.status import Unreachable

    try:
        found = explained.read(gateway, request)
    except Unreachable as error:
        _fail(str(error), 1)
    print(json.dumps(found) if as_json else explained.in_words(found))


def main() -> None:
    """The console command."""
    command, *arguments = sys.argv[1:] or [""]
    if command in PROGRAMS:  # before typer, which would swallow a `--`
        _become(PROGRAMS[command].module, arguments)
    if command == "bench" and arguments and arguments[0] in BENCHES:
        _become(BENCHES[arguments[0]].module, arguments[1:])
    sys.exit(run_app(app, "sglang-fair"))


def _become(module: str, arguments: list[str]) -> NoReturn:
    """This process goes on as `python -m module`, so that signals and the exit code are that program's."""
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


def _fail(text: str, code: int = 2) -> NoReturn:
    print(f"sglang-fair: {text}", file=sys.stderr)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
