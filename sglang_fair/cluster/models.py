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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from sglang_fair.common.pairs import split_pairs
from sglang_fair.settings.setting import SettingError, settings_of
from sglang_fair.settings.table import Cluster

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
_COUNTED = re.compile(r"([^:].*?)(?::([0-9]+))?")
_REPLICA = re.compile(r"r([0-9]+)")
NONE, ALL = "none", "all"
RESERVED = "default"
"""Clients mean the first model by it (`router.gateway.request.names`)."""


@dataclass(frozen=True)
class Dealt:
    """The models of a cluster, by the names that clients use; "" is the one of --model alone."""

    models: Mapping[str, str]
    """What --model would be for each, in the order given."""
    first: tuple[str, ...]
    """Of each replica, what it begins with."""
    loadable: Mapping[int, tuple[str, ...]]
    """By number of the replica, what it can load, the one first that it begins with. Others keep theirs."""


def deal(cluster: Cluster) -> Dealt:
    """Raises SettingError."""
    models, counts = _parsed(cluster)
    first = _in_turn_of(cluster, models, counts)
    swaps = _swaps(cluster, tuple(models), len(first))
    first = tuple(
        name if name in swaps.get(index, (name,)) else swaps[index][0] for index, name in enumerate(first)
    )
    if unused := models.keys() - {*first, *(name for names in swaps.values() for name in names)}:
        raise _wrong(f"--swap: no replica can load {min(unused)}", "swap")
    loadable = {
        index: (first[index], *(name for name in names if name != first[index]))
        for index, names in swaps.items()
        if len(names) > 1
    }
    return Dealt(models, first, loadable)


def _parsed(cluster: Cluster) -> tuple[dict[str, str], dict[str, int]]:
    """What each name stands for, and how many replicas of it there are, where that is said."""
    try:
        pairs = split_pairs(cluster.models, "model")
    except ValueError as error:
        raise _wrong(f"--models: {error}") from None
    if not pairs:
        return {"": cluster.model}, {}
    if cluster.model != settings_of(Cluster)["model"].default:
        raise _wrong("--model and --models: give one of them")
    models, counts = {}, {}
    for name, value in pairs:
        if not _NAME.fullmatch(name) or name == RESERVED:
            raise _wrong(
                f"--models: a name is of letters, digits, dots, dashes and slashes, and not {RESERVED!r}: {name!r:.80}"
            )
        found = _COUNTED.fullmatch(value)
        if found is None or not 1 <= int((found[2] or "1")[:6]) <= 100_000:
            raise _wrong(f"--models: {name}={value:.80} is not NAME=MODEL or NAME=MODEL:N")
        models[name] = found[1]
        if found[2]:
            counts[name] = int(found[2])
    return models, counts


def _in_turn_of(cluster: Cluster, models: Mapping[str, str], counts: Mapping[str, int]) -> tuple[str, ...]:
    """The model of each replica, as if none could load another."""
    if not counts:
        if cluster.replicas < len(models) and cluster.swap == NONE:
            raise _wrong(f"--replicas {cluster.replicas} are too few for {len(models)} models")
        return in_turn(dict.fromkeys(models, cluster.replicas), cluster.replicas)
    if without := ", ".join(name for name in models if name not in counts):
        raise _wrong(f"--models: say of {without} too how many replicas it has, as NAME=MODEL:N")
    total = sum(counts.values())
    if cluster.replicas not in (total, settings_of(Cluster)["replicas"].default):
        raise _wrong(f"--models asks for {total} replicas, and --replicas for {cluster.replicas}")
    return in_turn(counts, total)


def _swaps(cluster: Cluster, known: tuple[str, ...], replicas: int) -> dict[int, tuple[str, ...]]:
    if cluster.swap == NONE:
        return {}
    if known == ("",):
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
        number = _REPLICA.fullmatch(replica)
        if number is None or int(number[1]) >= replicas:
            raise _wrong(
                f"--swap: there is no replica {replica!r:.40}; there are r0 to r{replicas - 1}", "swap"
            )
        names = tuple(dict.fromkeys(part.strip() for part in text.split("+")))
        for name in names:
            if name not in known:
                raise _wrong(f"--swap: there is no model {name!r:.80}; there are {', '.join(known)}", "swap")
        found[int(number[1])] = names
    return found


def in_turn(counts: Mapping[str, int], total: int) -> tuple[str, ...]:
    """`total` names, each in its turn, as long as it has any of its `counts` left."""
    rounds = (name for turn in range(total) for name in counts if turn < counts[name])
    return tuple(islice(rounds, total))


def fewest(names: Sequence[str], has: Sequence[str]) -> str:
    """Of `names`, the first that the fewest replicas have, where `has` is what each has."""
    counts = Counter(has)
    return min(names, key=lambda name: counts[name])


def _wrong(text: str, field: str = "models") -> SettingError:
    return SettingError(text, field)
