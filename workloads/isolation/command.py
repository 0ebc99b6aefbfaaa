"""`sglang-fair bench isolation`: what one client's load does to the others, beside stock SGLang in the same run.

    sglang-fair bench isolation [--quick] [--json FILE] [--sglang-router PATH]

On emulated A100, which SGLang's own scheduler believes to be real, a client floods the cluster in one way after the
other. Beside it a light client holds short conversations, or a victim has requests running. The stacks are ours,
`sglang-fair cluster` with each policy, and stock: SGLang's own scheduler (`fcfs`) behind sglang-router (`cache_aware`;
install it by `python -m venv V && V/bin/pip install sglang-router==0.3.2` and name it by `--sglang-router V/bin/smg`).
Stock replicas are those of such a cluster, whose own gateway stands in where there is no sglang-router. `attacks` says
who sends what, `measures` what the numbers are.

An emulated GPU keeps true time only as long as the machine's cores can run all schedulers. `--time-scale` makes every
step so many times as long, and the result's `timing` says how much of their time the GPUs of each stack stood still
although requests were there.
"""

import asyncio
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

from router.placement import PLACEMENTS
from sglang_fair.bench import BenchOptions, Show, carry_out
from sglang_fair.bench.children import Children, DidNotStart, free_ports, until_served
from sglang_fair.cluster.options import USUAL
from sglang_fair.common.provenance import machine, versions
from sglang_fair.core import POLICIES
from sglang_fair.settings.commands import Option, PassedOn, choices, command, run
from sglang_fair.settings.program import parse
from sglang_fair.settings.setting import changed, command_line
from sglang_fair.settings.table import STOCK_PREFIX
from sglang_fair.settings.table import Cluster as ClusterSettings
from workloads.clusters import Cluster, ClusterError, SpawnCluster, drive, turns, verify
from workloads.isolation.attacks import ATTACKS, FLOOD, LIGHT_PERIOD_S, Scene, find_attack, scenes
from workloads.isolation.measures import OURS, STOCK, IsolationRow, Observed, Stack, observe, rows
from workloads.programs import PackedCodec
from workloads.records import Cell
from workloads.report import number
from workloads.runs.comparison import names
from workloads.session import Plan
from workloads.terminal import sigterm_as_ctrl_c

NAME = "isolation"
STOCK_POLICY, STOCK_PLACEMENT = f"{STOCK_PREFIX}fcfs", "cache_aware"

EPILOG = "Arguments behind -- are further options of `sglang-fair cluster`, for our clusters."

STREAM_INTERVAL_TOKENS = 16
"""Tokens in each chunk of a stream but the first: every chunk is work for this machine's cores, and none of ours."""

FIRST_REQUEST = (
    b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 64\r\n\r\n"
    + b'{"input_ids":[1,2,3,4],"sampling_params":{"max_new_tokens":1}}'.ljust(64)
)

COLUMNS = {
    "victim share of GPS": "victim_share_of_gps",
    "slowdown/n": "slowdown_over_n",
    "TTFT P99/solo": "ttft_p99_over_solo",
    "tokens/stock": "throughput_over_stock",
}


@dataclass(frozen=True, kw_only=True)
class IsolationOptions(BenchOptions):
    quick: Annotated[
        bool,
        Option(
            "--quick",
            help="One short run of each scene, policies but the first with the first attack alone: under ten minutes.",
        ),
    ] = False
    attacks: Annotated[
        str, Option(metavar="ATTACK,...", help=f"Comma separated, of {', '.join(ATTACKS)}, and {FLOOD}N.")
    ] = ",".join(ATTACKS)
    policies: Annotated[
        str, Option(metavar="POLICY,...", help="Ours, comma separated; stock SGLang is always there.")
    ] = "dlpm,vtc"
    placement: Annotated[str, choices(list(PLACEMENTS), "Before our policies.")] = USUAL
    light: Annotated[int, Option(metavar="N", min=1, help="Light clients beside the one that floods.")] = 1
    replicas: Annotated[int, Option(metavar="N", min=1, help="In each cluster.")] = 4
    gpu: Annotated[str, Option(help="The emulated GPU.")] = "a100-80g"
    model: Annotated[str, Option(help="The emulated model.")] = "llama-3.1-8b"
    time_scale: Annotated[
        float, Option(metavar="FACTOR", help="An emulated step takes so many times as long.")
    ] = 2.0
    seconds: Annotated[
        float | None,
        Option(metavar="S", help="Measured in each run, of the engine's time (10; with --quick 3)."),
    ] = None
    repeats: Annotated[
        int | None,
        Option(metavar="N", min=1, help="Runs of each scene; medians are shown (3; with --quick 1)."),
    ] = None
    sglang_router: Annotated[
        str, Option(metavar="PATH", help="The program in front of stock SGLang: smg or sglang-router.")
    ] = "smg"
    records: Annotated[Path | None, Option(metavar="DIR", help="Keep each run's records there.")] = None
    rest: PassedOn = None

    def __post_init__(self) -> None:
        if self.time_scale <= 0 or (self.seconds is not None and not 0 < self.seconds < float("inf")):
            raise ValueError("--seconds and --time-scale must be positive")

    # Times of a run are the engine's; on this machine they take `time_scale` times as long.

    @property
    def warm_up_s(self) -> float:
        return 2.0 if self.quick else 4.0

    @property
    def measured_s(self) -> float:
        return self.seconds or (3.0 if self.quick else 10.0)

    @property
    def period_s(self) -> float:
        return 1.5 if self.quick else LIGHT_PERIOD_S / 2

    @property
    def stacks(self) -> dict[Stack, tuple[str, ...]]:
        """Each with its attacks. Raises ValueError."""
        attacks = names(self.attacks)
        for name in attacks:
            find_attack(name)
        found = {Stack(STOCK, STOCK_PLACEMENT, STOCK_POLICY): attacks}
        for place, policy in enumerate(names(self.policies)):
            if policy not in POLICIES:
                raise ValueError(f"no policy {policy!r}; there are {', '.join(POLICIES)}")
            found[Stack(OURS, self.placement, policy)] = attacks[:1] if self.quick and place else attacks
        return found

    @property
    def stock(self) -> ClusterSettings:
        return ClusterSettings(
            replicas=self.replicas,
            engine="emulated",
            gpu=self.gpu,
            model=self.model,
            time_scale=self.time_scale,
            extra=("--stream-interval", str(STREAM_INTERVAL_TOKENS)),
        )

    @property
    def ours(self) -> ClusterSettings:
        return our_settings(self.stock, self.rest or ())


def isolation(given: IsolationOptions) -> int:
    """Measure what one client's load does to the others, beside stock SGLang behind sglang-router.

    Progress and a table go to stderr; the result is the last line of stdout. Exit code 0, 2 for bad input or a cluster
    that does not start or breaks down.
    """
    logs, stacks, _ = Path(tempfile.mkdtemp(prefix="isolation-")), given.stacks, given.ours

    def measuring(show: Show) -> dict[str, Any]:
        show(f"logs of the clusters: {logs}")
        if shutil.which(given.sglang_router) is None:
            show(
                f"there is no program {given.sglang_router}: our own gateway with cache_aware stands in for it"
            )
        return measure(show, given, stacks, logs)

    with sigterm_as_ctrl_c():
        carry_out(measuring, given.json, (ClusterError, DidNotStart, OSError))
    return 0


def measure(
    show: Show, given: IsolationOptions, stacks: Mapping[Stack, Sequence[str]], logs: Path
) -> dict[str, Any]:
    """The result, of each stack with its attacks.

    Raises ClusterError and DidNotStart for a stack that does not start or breaks down.
    """
    repeats = given.repeats or (1 if given.quick else 3)
    runs: dict[tuple[Stack, Scene], list[Observed]] = {}
    timing: dict[Stack, list[Mapping[str, float]]] = {stack: [] for stack in stacks}
    reports: dict[str, Any] = {}
    for repeat, stack in turns(list(stacks), repeats):
        show(f"repeat {repeat + 1}, starting {stack.title}")
        with start(given, stack, logs) as (cluster, reports[stack.title]):
            for scene in scenes(stacks[stack], given.light):
                cell = Cell(scene.name, f"{stack.placement}+{stack.policy}", repeat, f"{given.seed}.{repeat}")
                found, passed = one(given, cluster, scene, cell, reports[stack.title])
                runs.setdefault((stack, scene), []).append(found)
                timing[stack] += passed
                show(
                    f"  {scene.name}: {found.tokens_per_s:,.0f} tokens/s, {found.cut_off} programs cut off, "
                    f"{found.failed} requests failed; GPUs busy {busy(passed):.0%}, stalled {stalled(passed):.1%}"
                )
    table = rows(runs)
    show(render(table))
    return {
        "bench": NAME,
        "seed": given.seed,
        "repeats": repeats,
        "versions": versions(),
        "machine": machine(),
        "case": {
            "attacks": {name: asdict(find_attack(name)) for name in dict.fromkeys(chain(*stacks.values()))},
            "light": given.light,
            "ours": changed(given.ours),
            "stock": changed(given.stock),
            "warm_up_s": given.warm_up_s,
            "seconds": given.measured_s,
            "period_s": given.period_s,
        },
        "stacks": reports,
        "timing": {
            stack.title: {"busy": round(busy(passed), 4), "stalled": round(stalled(passed), 4)}
            for stack, passed in timing.items()
        },
        "rows": [asdict(row) for row in table],
    }


@contextmanager
def start(given: IsolationOptions, stack: Stack, logs: Path) -> Iterator[tuple[Cluster, dict[str, Any]]]:
    """The stack until the context ends, and what its processes say that they are.

    Raises ClusterError and DidNotStart.
    """
    router = shutil.which(given.sglang_router) if stack.name == STOCK else None
    spawn = SpawnCluster(given.stock if stack.name == STOCK else given.ours, logs)
    with spawn(stack.placement, stack.policy) as cluster:
        reported = verify(cluster, stack.placement, stack.policy)
        if router is None:
            yield cluster, reported
            return
        children = Children()
        try:
            port, metrics = free_ports(2)
            child = children.start(
                router, "launch", "--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware",
                "--prometheus-port", str(metrics), "--log-level", "error", "--worker-urls", *cluster.replicas,
            )  # fmt: skip
            asyncio.run(until_served(port, FIRST_REQUEST, [child]))
            yield (
                replace(cluster, gateway=f"http://127.0.0.1:{port}"),
                {**reported, "placement": "sglang-router's cache_aware"},
            )
        finally:
            children.close()


def one(
    given: IsolationOptions, cluster: Cluster, scene: Scene, cell: Cell, reported: Mapping[str, Any]
) -> tuple[Observed, list[Mapping[str, float]]]:
    """One run, and what each emulated GPU's clock says. When load has ended, light clients' programs are waited for."""
    pace, replicas = given.time_scale, len(cluster.replicas)
    clients, at_once = scene.load(
        PackedCodec(), cell.seed, replicas=replicas, period_s=given.period_s, pace=pace
    )
    plan = Plan(
        (given.warm_up_s + given.measured_s) * pace,
        at_once=at_once,
        drain_s=(1.0 if given.quick else 5.0) * pace,
        drain_for="well-behaved",
        connections_per_client=max([256, *at_once.values()]),
    )
    case = {"scene": asdict(scene), "plan": asdict(plan), "time_scale": pace}
    path = None if given.records is None else cell.path(given.records)
    run, passed = drive(cluster, clients, plan, cell, reported=reported, case=case, path=path)
    return observe(run, given.warm_up_s * pace, pace), passed


def our_settings(base: ClusterSettings, words: Sequence[str]) -> ClusterSettings:
    """`base` with what the words say as on the command line of `sglang-fair cluster`. SystemExit for bad ones.

    Times are the engine's: they take as long as its steps.
    """
    given: ClusterSettings = parse("cluster", (*words, *command_line(ClusterSettings, changed(base))))
    target_ms = given.target_tpot_ms
    return replace(
        given,
        stall_ms=given.stall_ms * base.time_scale,
        target_tpot_ms=None if target_ms is None else target_ms * base.time_scale,
    )


def stalled(totals: Sequence[Mapping[str, float]]) -> float:
    """The part of their busy time that emulated GPUs stood still although requests were there."""
    busy_s = sum(one["busy_s"] for one in totals)
    return sum(one["stalled_s"] for one in totals) / busy_s if busy_s else 0.0


def busy(totals: Sequence[Mapping[str, float]]) -> float:
    """The part of the runs' time in which emulated GPUs computed."""
    return sum(one["busy_s"] for one in totals) / sum(one["elapsed_s"] for one in totals)


def render(table: Sequence[IsolationRow]) -> str:
    lines = [
        f"{'stack':24}{'attack':18}{'n':>3}" + "".join(f"{title:>{len(title) + 3}}" for title in COLUMNS)
    ]
    for row in table:
        values = (f"{number(getattr(row, field)):>{len(title) + 3}}" for title, field in COLUMNS.items())
        lines.append(f"{row.stack + ', ' + row.policy:24}{row.attack:18}{row.clients:>3}" + "".join(values))
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    return run(command(IsolationOptions, isolation), f"sglang-fair bench {NAME}", arguments, epilog=EPILOG)


if __name__ == "__main__":
    sys.exit(main())
