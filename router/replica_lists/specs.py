"""A replica in words, as a command line and a file have it, and a DNS name whose addresses are replicas. Pure.

    r0,http=http://10.0.0.7:30000,kv=tcp://10.0.0.7:5557,replay=tcp://10.0.0.7:5558,model=llama
    replicas.default.svc.cluster.local:30000,kv=5557,replay=5558,scheme=https

All functions raise ValueError, with a text of one line, for what cannot be read.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from router.events import LARGEST_CAPACITY, LEAST_CAPACITY, URL_PATTERN, ZMQ_PATTERN, WorkerUp
from sglang_fair.common.pairs import split_pairs

ADDRESSES = ("kv", "replay", "load")
FIELDS = (*ADDRESSES, "capacity", "model")
WORKER_FORM = "NAME,http=URL[,kv=ADDRESS][,replay=ADDRESS][,load=ADDRESS][,capacity=NUMBER][,model=NAME]"
NAME_FORM = "NAME:PORT[,scheme=https][,kv=PORT][,replay=PORT][,load=PORT][,capacity=NUMBER][,model=NAME]"


def worker(text: str) -> WorkerUp:
    """`WORKER_FORM` as an event. With `model=a|b` it can load these, and its agent says which it has."""
    called, values = _read(text, WORKER_FORM, "http")
    if not values.get("http"):
        raise ValueError(f"{text!r} is not {WORKER_FORM}")
    if not re.fullmatch(URL_PATTERN, values["http"]):
        raise ValueError(f"worker {called}: http={values['http']} is no URL")
    _check_addresses(f"worker {called}", values, lambda one: re.fullmatch(ZMQ_PATTERN, one), "ZMQ address")
    return _up(called, values["http"], values)


def written(up: WorkerUp) -> str:
    """A replica as `worker` reads it."""
    fields = {"kv": up.kv, "replay": up.replay, "load": up.load, "model": "|".join(up.models)}
    return f"{up.worker},http={up.url}" + "".join(f",{key}={value}" for key, value in fields.items() if value)


@dataclass(frozen=True)
class Name:
    """A DNS name, the port at which each of its addresses is a replica, and what else holds for each."""

    host: str
    port: int
    values: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def worker(self, address: str) -> WorkerUp:
        """The replica at one of its addresses, which names it."""
        host = f"[{address}]" if ":" in address else address
        values = dict(self.values)
        for key in ADDRESSES:
            if key in values:
                values[key] = f"tcp://{host}:{values[key]}"
        scheme = values.get("scheme", "http")
        return _up(f"{address}:{self.port}", f"{scheme}://{host}:{self.port}", values)


def name(text: str) -> Name:
    """`NAME_FORM`."""
    called, values = _read(text, NAME_FORM, "scheme")
    host, _, port = called.rpartition(":")
    if not host or not _is_port(port):
        raise ValueError(f"{text!r} is not {NAME_FORM}")
    if values.get("scheme", "http") not in ("http", "https"):
        raise ValueError(f"{called}: scheme={values['scheme']} is not http or https")
    _check_addresses(called, values, _is_port, "port")
    made = Name(host, int(port), tuple(values.items()))
    made.worker("127.0.0.1")  # what is wrong with its capacity is said here
    return made


def lines(text: str) -> list[WorkerUp]:
    """A file of replicas: one in a line, as `worker` has it. Empty lines and those that begin with # say nothing."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            found.append(worker(line.strip()))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    return all_of(found)


def all_of(ups: Iterable[WorkerUp]) -> list[WorkerUp]:
    """Replicas that can be listed together."""
    found = list(ups)
    names = [up.worker for up in found]
    if len(set(names)) < len(names):
        raise ValueError(f"a worker is named twice: {', '.join(names)}")
    silent = [up.worker for up in found if not up.models]
    if silent and len(silent) < len(found):
        raise ValueError(f"say model= of {', '.join(silent)} too, as of the others")
    return found


def _up(called: str, url: str, values: Mapping[str, str]) -> WorkerUp:
    models = tuple(filter(None, values.get("model", "").split("|")))
    return WorkerUp(
        called,
        url,
        values.get("kv"),
        values.get("replay"),
        capacity=_capacity(values),
        load=values.get("load"),
        models=models,
        loaded=models[0] if len(models) == 1 else "",
    )


def _read(text: str, form: str, *more: str) -> tuple[str, dict[str, str]]:
    """What it is called, and its fields: `FIELDS` or `more`."""
    called, _, rest = text.partition(",")
    try:
        values = dict(split_pairs(rest, "field"))
    except ValueError as error:
        raise ValueError(f"worker {called}: {error}") from None
    if not called or "=" in called or not set(values) <= {*FIELDS, *more} or not all(values.values()):
        raise ValueError(f"{text!r} is not {form}")
    return called, values


def _check_addresses(
    called: str, values: Mapping[str, str], is_one: Callable[[str], object], what: str
) -> None:
    for key in ADDRESSES:
        if key in values and not is_one(values[key]):
            raise ValueError(f"{called}: {key}={values[key]} is no {what}")
    if "replay" in values and "kv" not in values:
        raise ValueError(f"{called}: replay= is of no use without kv=")


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 6 and 0 < int(text) < 65536


def _capacity(values: Mapping[str, str]) -> float:
    text = values.get("capacity", "1")
    try:
        capacity = float(text)
    except ValueError:
        capacity = 0.0
    if not LEAST_CAPACITY <= capacity <= LARGEST_CAPACITY:
        raise ValueError(f"capacity={text} is no number from {LEAST_CAPACITY:g} to {LARGEST_CAPACITY:g}")
    return capacity
