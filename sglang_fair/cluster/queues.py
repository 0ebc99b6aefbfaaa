"""The queues of placement `qlm` and their planner, for `sglang-fair status` and `explain`."""

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
    """The planner in a line, what is missing in another, and a table of each replica's queue; nothing where no queues
    are planned. `front` is the answer of `/status`."""
    planner, queues = front.get("planner"), front.get("queues")
    if not planner or not queues:
        return []
    lines = [told_planner(planner, queues)]
    if planner.get("shortage"):
        lines.append(told_shortage(planner["shortage"]))
    return [*(Text(line) for line in lines), _table(queues)]


def told_planner(planner: Report, queues: Report) -> str:
    """The planner in a line."""
    counts, last = planner.get("counts", {}), planner.get("last")
    if planner.get("up"):
        words = f"planner {planner.get('name') or '?'}"
        if planner.get("standing_by"):
            words += f", {planner['standing_by']} more standing by"
    else:
        words = "no planner: queues are served by earliest deadline"
    words += f"; {counts.get('asked', 0):,} plans asked, {counts.get('answered', 0):,} answered"
    if last:
        words += f", the last {_seconds(last['s_ago'])} ago after {_seconds(last['after_s'])}"
        words += f" with {last['late']:,} groups late" if last["late"] else ""
    others = [
        f"{counts[name]:,} {name}" for name in ("stale", "refused", "unanswered", "gone") if counts.get(name)
    ]
    ignored = queues.get("plans", {}).get("ignored")
    others += [f"{ignored:,} entries ignored"] if ignored else []
    words += "".join(f", {one}" for one in others)
    r2 = queues.get("r2")
    return words + ("" if r2 is None else f"; waits are estimated with R² {r2:.3f}")


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
