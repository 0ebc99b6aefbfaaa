"""The pictures of docs/deficit.md: runs of the simulated replica, drawn as SVG that is legible on light and on dark.

    python -m docs.deficit_pictures        writes docs/deficit-share.svg and docs/deficit-rounds.svg

Two clients at one modelled A10G with Llama-3.2-3B: `greedy` keeps 48 requests at the replica, `calm` 16. All prompts of
a client begin with the same 1,024 tokens. Nothing in a run is random, so the same code writes the same files.
"""

import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_fair.sim.events import Finished, SimRequest
from sglang_fair.sim.replica import Replica
from workloads.simulation.site import Site

DOCS = Path("docs")
AT_A_TIME: Mapping[str, int] = {"greedy": 48, "calm": 16}
PREFIX_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 1024, 256, 128
QUANTUM, MAX_RUNNING = 10_000.0, 8
DURATION_S, SAMPLE_S = 60.0, 0.25

COLOURS = {"greedy": "#d9602b", "calm": "#2f86c5"}
GREY = "#808790"
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 380, 240, 62, 34, 12, 40


@dataclass(frozen=True)
class Sample:
    """What the replica says of itself at one time."""

    t_s: float
    service: Mapping[str, float]
    counters: Mapping[str, float | None]
    bound: float | None


def run(policy: str) -> list[Sample]:
    """A minute of both clients; each answer brings the client's next request."""
    site = Site(
        policy=policy, quantum=QUANTUM if policy == "dlpm" else None, gpu="a10g", model="llama-3.2-3b",
        replicas=1, max_running=MAX_RUNNING,
    )  # fmt: skip
    replica, sent = site.make_replica(0, events=False), 0
    owners: dict[str, str] = {}

    def ask(client: str, now_s: float) -> None:
        nonlocal sent
        sent += 1
        owners[str(sent)] = client
        replica.arrive(_request(str(sent), client, sent), now_s)

    for client, count in AT_A_TIME.items():
        for _ in range(count):
            ask(client, 0.0)
    samples, due_s = [], 0.0
    while replica.next_s <= DURATION_S:
        now_s = replica.next_s
        for event in replica.advance(now_s):
            if isinstance(event, Finished):
                ask(owners.pop(event.id), now_s)
        while due_s <= now_s:
            samples.append(_sample(replica, due_s))
            due_s += SAMPLE_S
    return samples


def _request(id: str, client: str, number: int) -> SimRequest:
    prefix = range(1, PREFIX_TOKENS + 1) if client == "greedy" else range(20_001, 20_001 + PREFIX_TOKENS)
    first = 100_000 + number * QUESTION_TOKENS
    tokens = array("I", [*prefix, *range(first, first + QUESTION_TOKENS)]).tobytes()
    return SimRequest(id, client, tokens, ANSWER_TOKENS, ANSWER_TOKENS)


def _sample(replica: Replica, t_s: float) -> Sample:
    status = replica.queue.status()
    clients = status["clients"]
    return Sample(
        t_s,
        {name: clients.get(name, {}).get("service", 0.0) for name in AT_A_TIME},
        {name: clients.get(name, {}).get("counter") for name in AT_A_TIME},
        status["bound"],
    )


# ---- drawing

Line = tuple[str, Sequence[tuple[float, float]], str]
"""A colour, points, and dashes ("" for none)."""


def panel(title: str, lines: Sequence[Line], unit: str, low: float, high: float, at: int) -> Iterator[str]:
    """One set of axes, the `at`-th from the left. Times are in seconds, values in thousands."""
    x0 = at * WIDTH + LEFT
    wide, tall = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(t_s: float) -> float:
        return round(x0 + t_s / DURATION_S * wide, 1)

    def y(value: float) -> float:
        return round(TOP + (high - value) / (high - low) * tall, 1)

    yield f'<text x="{x0}" y="18" class="title">{title}</text>'
    step = (high - low) / 4
    for value in [low + step * count for count in range(5)]:
        yield f'<path d="M{x0} {y(value)}h{wide}" class="grid"/>'
        yield f'<text x="{x0 - 6}" y="{y(value) + 4}" class="right">{value / 1000:,.0f}</text>'
    for t_s in range(0, int(DURATION_S) + 1, 20):
        yield f'<text x="{x(t_s)}" y="{TOP + tall + 17}" class="middle">{t_s} s</text>'
    yield f'<text x="{x0}" y="{HEIGHT - 6}">{unit}</text>'
    for colour, points, dashes in lines:
        text = " ".join(f"{x(t_s)},{y(max(low, min(high, value)))}" for t_s, value in points)
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        yield f'<polyline points="{text}" stroke="{colour}"{dashed}/>'


def drawing(panels: Sequence[Iterator[str]], names: Mapping[str, str], about: str) -> str:
    """The whole picture, with a legend below."""
    wide, tall = WIDTH * len(panels), HEIGHT + 24
    legend = "".join(
        f'<path d="M{LEFT + 190 * place} {HEIGHT + 12}h22" stroke="{colour}" stroke-width="3"/>'
        f'<text x="{LEFT + 190 * place + 28}" y="{HEIGHT + 16}">{name}</text>'
        for place, (name, colour) in enumerate(names.items())
    )
    body = "\n".join(line for each in panels for line in each)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {tall}" width="{wide}" height="{tall}" '
        f'role="img" aria-label="{about}">\n'
        f"<style>text{{font:12px sans-serif;fill:{GREY}}}.title{{font-weight:bold;font-size:13px}}"
        ".right{text-anchor:end}.middle{text-anchor:middle}"
        f".grid{{stroke:{GREY};stroke-opacity:.25;fill:none}}polyline{{fill:none;stroke-width:2}}</style>\n"
        f"{body}\n{legend}\n</svg>\n"
    )


def _nice(value: float) -> float:
    """A round number at or above."""
    step = 4_000.0
    while step * 4 < value:
        step *= 2
    return step * -(-value // step) if value else step


def share(runs: Mapping[str, Sequence[Sample]]) -> str:
    """What each client has been given, by policy."""
    high = _nice(max(one.service[name] for run in runs.values() for one in run for name in AT_A_TIME))
    panels = [
        panel(
            title, [(COLOURS[name], [(one.t_s, one.service[name]) for one in run], "") for name in AT_A_TIME],
            "thousands of service units", 0, high, place,
        )
        for place, (title, run) in enumerate(runs.items())
    ]  # fmt: skip
    names = {f"{name}, {count} at a time": COLOURS[name] for name, count in AT_A_TIME.items()}
    return drawing(panels, names, "Service of two clients over a minute, under LPM and under DLPM")


def rounds(samples: Sequence[Sample]) -> str:
    """The deficits, and the difference that they keep small."""
    deficits = [
        (COLOURS[name], [(one.t_s, one.counters[name] or 0.0) for one in samples], "") for name in AT_A_TIME
    ]
    low = -_nice(-min(value for _, points, _ in deficits for _, value in points))
    gap = [(one.t_s, abs(one.service["greedy"] - one.service["calm"])) for one in samples]
    bound = [(one.t_s, one.bound or 0.0) for one in samples if one.bound]
    top = _nice(max(value for _, value in bound))
    panels = [
        panel("Deficits", deficits, "thousands of service units", low, _nice(QUANTUM), 0),
        panel(
            "Difference of service, and its bound", [(GREY, bound, "5 4"), ("#3c9a5f", gap, "")],
            "thousands of service units", 0, top, 1,
        ),
    ]  # fmt: skip
    names = COLOURS | {"difference": "#3c9a5f", "bound": GREY}
    return drawing(panels, names, "Deficits of two clients under DLPM, and the difference of their service")


def pictures() -> dict[str, str]:
    """Each file's content, by name."""
    fair = run("dlpm")
    return {
        "deficit-share.svg": share({"Longest prefix first (lpm)": run("lpm"), "With deficits (dlpm)": fair}),
        "deficit-rounds.svg": rounds([one for one in fair if one.t_s <= DURATION_S]),
    }


def main() -> int:
    """Writes the pictures."""
    for name, text in pictures().items():
        (DOCS / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
