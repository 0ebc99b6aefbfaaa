"""The queues of placements with deadlines, for `sglang-fair status` and `explain`."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

MOST_SHOWN = 6
"""Groups of one replica."""
HEADINGS = ("replica", "model", "class", "tier", "waiting", "running", "starts in", "left", "late by")

Report = Mapping[str, Any]


def rendered(front: Report) -> list[RenderableType]:
    """The plans in a line, what is missing in another, and a table of each replica's queue; nothing where there are no
    queues. `front` is the answer of `/status`."""
    queues = front.get("queues")
    if not queues:
        return []
    lines = [told_plans(queues)]
    if queues.get("shortage"):
        lines.append(told_shortage(queues["shortage"]))
    return [*(Text(line) for line in lines if line), _table(queues)]


def told_plans(queues: Report) -> str:
    """The plans and the estimates in a line; "" where nothing is planned."""
    plans, r2 = queues.get("plans"), queues.get("r2")
    parts = []
    if plans:
        parts.append(f"{plans['asked']:,} plans asked, {plans['answered']:,} answered")
        if last := plans.get("last"):
            parts[-1] += f", the last {_seconds(last['s_ago'])} ago"
            parts[-1] += f" with {last['late']:,} groups late" if last["late"] else ""
        for name, words in (
            ("failed", "failed"), ("unanswered", "too late"), ("stale", "stale"), ("ignored", "entries ignored"),
        ):  # fmt: skip
            parts[-1] += f", {plans[name]:,} {words}" if plans.get(name) else ""
    parts += [] if r2 is None else [f"waits are estimated with R² {r2:.3f}"]
    return "; ".join(parts)


def told_shortage(shortage: Report) -> str:
    """How many replicas would do, in a line."""
    more, models = shortage.get("more"), shortage.get("models") or {}
    if more is None:
        words = "no number of replicas was found that would do"
        words += f", at least {shortage['least']} more are needed" if shortage.get("least") else ""
    elif not more:
        words = "the replicas that are there would do"
    else:
        named = ", ".join(f"{count} with {model}" for model, count in models.items() if model)
        words = f"{more} more replicas would do" + (f" ({named})" if named else "")
    why = f": {shortage['why']}" if shortage.get("why") else ""
    return f"deadlines cannot be met, for {_seconds(shortage.get('for_s'))}: {words}{why}"


def told_standing(standing: Report, when: str) -> Iterator[str]:
    """Where a request stands, or stood, in lines. `when` begins the first."""
    tier = "within its client's share" if standing["tier"] == 0 else "ahead of its client's share"
    model = f"model {standing['model']}, " if standing["model"] else ""
    yield (
        f"{when} in group {standing['group']} ({model}class {standing['class']}, tier {standing['tier']}: {tier}) with "
        f"{standing['with']:,} others"
    )
    if standing.get("worker") is None:
        if "worker" in standing:
            yield "  no replica can serve that group"
        return
    swaps = standing["swaps_before"]
    yield (
        f"  at {standing['worker']} behind {standing['groups_before']:,} groups of {standing['requests_before']:,} "
        f"requests" + (f", {swaps} of another model to be loaded" if swaps else "")
    )
    if standing["wait_s"] is not None:
        wait, likely = _seconds(standing["wait_s"]), _seconds(standing["likely_s"])
        yield f"  expected to wait {wait}, at most {likely} 99 times in 100"
    for row in standing["before"][:MOST_SHOWN]:
        yield (
            f"    group {row['group']}: {row['model'] or 'the model'}, {row['class']}, tier {row['tier']}, "
            f"{row['waiting']:,} waiting, {_seconds(row['slack_s'])} left"
        )


def _table(queues: Report) -> Table:
    waiting = sum(row["requests"] for row in queues.get("waiting", ()))
    late = sum(row["late"] for row in queues.get("waiting", ()))
    title = f"queues: {waiting:,} requests wait in {queues.get('groups', 0):,} groups"
    title += f", {late:,} in groups that will be late" if late else ""
    table = Table(title=title, title_justify="left", title_style="bold", show_edge=False, pad_edge=False)
    for at, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="left" if at < 3 else "right")
    for name, worker in queues.get("workers", {}).items():
        loaded = worker.get("loaded")
        rows = worker["groups"][:MOST_SHOWN]
        for row in rows:
            swap = "" if row["model"] == loaded else " (to be loaded)"
            table.add_row(
                name,
                Text(f"{row['model']}{swap}"),
                Text(row["class"]),
                *(f"{row[key]:,}" for key in ("tier", "waiting", "running")),
                _seconds(row["starts_s"]),
                "" if row["class"] == "(late)" else _seconds(row["slack_s"]),
                _seconds(row["late_s"]) if row["late_s"] else "",
            )
        more = len(worker["groups"]) - len(rows) + worker.get("more_groups", 0)
        if more or not rows:
            table.add_row(
                name, Text(f"{more:,} more groups" if more else f"{loaded or ''} nobody waits".strip())
            )
    return table


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    if abs(seconds) >= 600:
        return f"{seconds / 60:,.0f} min"
    return f"{1e3 * seconds:,.0f} ms" if abs(seconds) < 1 else f"{seconds:,.1f} s"
