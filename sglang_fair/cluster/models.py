"""Which model each replica of a cluster has. Pure.

    --model NAME                  one for all of them, called as it calls itself
    --models a=NAME,b=NAME        several, by the names that clients use; the replicas are dealt out in turn
    --models a=NAME:3,b=NAME:1    the same with so many replicas of each; then these make up --replicas

With --swap a replica can load several of them, one at a time; then there may be fewer replicas than models:

    --swap all                    each replica all of them
    --swap r0=a+b,r1=c            these replicas these

Whoever needs other numbers later adds replicas of a model while the cluster runs (`sglang-fair workers add --model`).
"""

import re
from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

from sglang_fair.common.pairs import split_pairs
from sglang_fair.settings.setting import SettingError, settings_of
from sglang_fair.settings.table import Cluster

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
NONE, ALL = "none", "all"
RESERVED = "default"
"""Clients mean the first model by it (`router.gateway.request.call`)."""

_M = TypeVar("_M")


def by_name(cluster: Cluster) -> dict[str, str]:
    """What each name stands for, in the order given: a value of --model. Empty for --model alone. Raises
    SettingError."""
    return {name: model for name, (model, _) in _parsed(cluster).items()}


def dealt(cluster: Cluster) -> tuple[str, ...]:
    """The name of each replica's first model; "" where they all have --model. Raises SettingError."""
    found = _dealt(cluster)
    swaps = _swaps(cluster, len(found))
    return tuple(
        name if name in swaps.get(index, (name,)) else swaps[index][0] for index, name in enumerate(found)
    )


def loadable(cluster: Cluster) -> dict[int, tuple[str, ...]]:
    """By number of the replica, the names of the models that it can load, the one first that it begins with. Replicas
    that keep theirs are left out. Raises SettingError."""
    first = dealt(cluster)
    swaps = _swaps(cluster, len(first))
    unused = by_name(cluster).keys() - {*first, *(name for names in swaps.values() for name in names)}
    if unused:
        raise _wrong(f"--swap: no replica can load {min(unused)}", "swap")
    return {
        index: (first[index], *(name for name in names if name != first[index]))
        for index, names in swaps.items()
        if len(names) > 1
    }


def _swaps(cluster: Cluster, replicas: int) -> dict[int, tuple[str, ...]]:
    known = tuple(by_name(cluster))
    if cluster.swap == NONE:
        return {}
    if not known:
        raise _wrong("--swap is for several --models", "swap")
    if cluster.engine == "emulated":
        raise _wrong("--swap needs weights, which an emulated replica has not", "swap")
    if cluster.swap == ALL:
        return dict.fromkeys(range(replicas), known)
    found: dict[int, tuple[str, ...]] = {}
    try:
        pairs = split_pairs(cluster.swap, "replica")
    except ValueError as error:
        raise _wrong(f"--swap: none, all, or as r0=a+b: {error}", "swap") from None
    for replica, text in pairs:
        number = replica.removeprefix("r")
        if (
            not (replica.startswith("r") and number.isascii() and number.isdecimal())
            or int(number) >= replicas
        ):
            raise _wrong(
                f"--swap: there is no replica {replica!r:.40}; there are r0 to r{replicas - 1}", "swap"
            )
        names = tuple(dict.fromkeys(part.strip() for part in text.split("+")))
        for name in names:
            if name not in known:
                raise _wrong(f"--swap: there is no model {name!r:.80}; there are {', '.join(known)}", "swap")
        found[int(number)] = names
    return found


def _dealt(cluster: Cluster) -> tuple[str, ...]:
    found = _parsed(cluster)
    if not found:
        return ("",) * cluster.replicas
    counts = {name: count for name, (_, count) in found.items() if count is not None}
    if not counts:
        if cluster.replicas < len(found) and cluster.swap == NONE:
            raise _wrong(f"--replicas {cluster.replicas} are too few for {len(found)} models")
        return tuple(in_turn(dict.fromkeys(found, cluster.replicas), cluster.replicas))
    if len(counts) < len(found):
        without = ", ".join(name for name in found if name not in counts)
        raise _wrong(f"--models: say of {without} too how many replicas it has, as NAME=MODEL:N")
    total = sum(counts.values())
    if cluster.replicas not in (total, settings_of(Cluster)["replicas"].default):
        raise _wrong(f"--models asks for {total} replicas, and --replicas for {cluster.replicas}")
    return tuple(in_turn(counts, total))


def in_turn(counts: dict[str, int], total: int) -> list[str]:
    """`total` names, each in its turn, as long as it has any of its `counts` left."""
    left, found = dict(counts), list[str]()
    while len(found) < total and any(left.values()):
        for name in left:
            if left[name] and len(found) < total:
                left[name] -= 1
                found.append(name)
    return found


def fewest(names: Sequence[str], has: Sequence[str]) -> str:
    """Of `names`, the first that the fewest replicas have, where `has` is what each has."""
    counts = Counter(has)
    return min(names, key=lambda name: counts[name])


def _parsed(cluster: Cluster) -> dict[str, tuple[str, int | None]]:
    try:
        pairs = split_pairs(cluster.models, "model")
    except ValueError as error:
        raise _wrong(f"--models: {error}") from None
    if pairs and cluster.model != settings_of(Cluster)["model"].default:
        raise _wrong("--model and --models: give one of them")
    found: dict[str, tuple[str, int | None]] = {}
    for name, value in pairs:
        if not _NAME.fullmatch(name) or name == RESERVED:
            raise _wrong(
                f"--models: a name is of letters, digits, dots, dashes and slashes, and not {RESERVED!r}: {name!r:.80}"
            )
        model, colon, tail = value.rpartition(":")
        if not (colon and tail.isascii() and tail.isdecimal()):
            model, tail = value, ""
        if not model or (tail and not 1 <= int(tail[:6]) <= 100_000):
            raise _wrong(f"--models: {name}={value:.80} is not NAME=MODEL or NAME=MODEL:N")
        found[name] = model, int(tail) if tail else None
    return found


def _wrong(text: str, field: str = "models") -> SettingError:
    return SettingError(text, field)
