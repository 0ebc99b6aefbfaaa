"""How fast batches are accepted and fed, and what many of them cost in memory.

    sglang-fair bench batches [--quick] [--json FILE] [--batches DIR|postgresql://…]

Everything runs in one process, on the code of store and feeder, on the disk or the server that is measured with.

* accept_per_s: lines read, checked and committed, in commits of 500.
* feed_per_s: items leased, answered at once and written with their ends, as a feeder's turns do it with a window of
  1,024, which it need not widen first; two commits a turn.
* look_ms: a look at all that is open. feeder_mib: what Python holds for it at most meanwhile, and while it feeds.
"""

import shutil
import sys
import tempfile
import time
import tracemalloc
import uuid
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

from router.batches.folder import is_database, open_blobs, open_store
from router.batches.model import StoredBatch
from router.batches.store import Store
from router.feeder import core
from router.feeder.answers import Answer
from router.feeder.intake import Validation
from sglang_fair.bench import Show, carry_out
from sglang_fair.common.deadlines import DEFAULT_CLASSES
from sglang_fair.common.provenance import machine
from sglang_fair.settings import commands
from sglang_fair.settings.commands import Option

BATCHES, CLIENTS, WINDOW = 40, 20, 1024
PROMPT = b"word " * 60
RESULT = b'{"text":"%s"}' % (b"x" * 640)


def a_line(number: int) -> bytes:
    """A request of 60 words."""
    return (
        b'{"custom_id": "request-%d", "method": "POST", "url": "/v1/completions", "body": '
        b'{"model": "tiny", "prompt": "%d %s", "max_tokens": 64}}\n' % (number, number, PROMPT)
    )


def a_batch(number: int, run: str) -> StoredBatch:
    """One of a client's."""
    now_s = int(time.time())
    return StoredBatch(
        id=f"batch_{run}{number:08d}", client=f"client {number % CLIENTS}", endpoint="/v1/completions",
        input_file="input", window="24h", created_s=now_s, expires_s=now_s + 86_400, models=("tiny",),
    )  # fmt: skip


def accept(store: Store, uploads: Path, items: int, owner: str) -> float:
    """Items accepted a second, in `BATCHES` batches of one file."""
    blobs, each, now_s = open_blobs("", str(uploads)), items // BATCHES, int(time.time())
    writing = blobs.create("input")
    writing.write(b"".join(map(a_line, range(each))))
    writing.keep()
    for number in range(BATCHES):
        store.add_batch(a_batch(number, owner[:24]))
    began_s = time.perf_counter()
    for _ in range(BATCHES):
        store.renew(owner, time.time() + 86_400)
        batch = store.claim(owner, ())
        assert batch is not None
        validation = Validation(store, blobs, batch, owner, items, 1 << 24)
        while not validation.step(now_s):
            pass
    return each * BATCHES / (time.perf_counter() - began_s)


def feed(store: Store, items: int, owner: str) -> dict[str, float]:
    """A feeder's turns, between a store and a gateway that answers at once; in memory as `tracemalloc` sees it, which
    is slow, the first tenth of them."""
    measured: dict[str, float] = {}
    feeder = core.Feeder(DEFAULT_CLASSES, WINDOW)
    feeder._windows["tiny"] = core.Window(WINDOW, WINDOW)
    tracemalloc.start()
    done, began_s, timed = 0, time.perf_counter(), 0
    while done < items:
        now_s = time.time()
        if not done % (20 * WINDOW):
            looked_s = time.perf_counter()
            feeder.look(store.open_batches(), store.parts(), now_s)
            measured.setdefault("look_ms", round(1e3 * (time.perf_counter() - looked_s), 2))
        wanted, most_bytes = feeder.wanted(now_s)
        sends, _ = feeder.leased(wanted, store.lease(owner, wanted, most_bytes))
        if not sends:
            feeder.look(store.open_batches(), store.parts(), now_s)
            continue
        steps = [feeder.answered(send, Answer(200, RESULT, "id"), 0, now_s) for send in sends]
        done += store.finish([one.ending for one in steps if isinstance(one, core.Write)], int(now_s))
        feeder.unwritten = 0
        if tracemalloc.is_tracing() and done >= items // 10:
            measured["feeder_mib"] = round(tracemalloc.get_traced_memory()[1] / (1 << 20), 2)
            tracemalloc.stop()
            timed, began_s = done, time.perf_counter()
    return measured | {"feed_per_s": round((done - timed) / (time.perf_counter() - began_s))}


def run(items: int, batches: str | None, show: Show) -> dict[str, Any]:
    """Measures everything, in a folder that is made and taken away, or in a database of its own."""
    is_remote = batches is not None and is_database(batches)
    place = Path(tempfile.mkdtemp(prefix="bench-batches-", dir=None if is_remote else batches))
    owner = uuid.uuid4().hex
    try:
        store = open_store(batches if is_remote and batches else str(place))
        accepted = accept(store, place / "uploads", items, owner)
        show(f"{items:,} items accepted: {accepted:,.0f} a second")
        fed = feed(store, items // BATCHES * BATCHES, owner)
        show(f"fed: {fed['feed_per_s']:,} a second, a look {fed['look_ms']} ms, {fed['feeder_mib']} MiB")
        store.shut()
    finally:
        shutil.rmtree(place)
    return {
        "bench": "batches", "versions": {"sglang-fair": version("sglang-fair")}, "machine": machine(),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "items": items, "accept_per_s": round(accepted), **fed,
    }  # fmt: skip


def main(
    json: Annotated[Path | None, Option(metavar="FILE", help="Write the last line to FILE too.")] = None,
    quick: Annotated[bool, Option("--quick", help="A tenth of the items.")] = False,
    items: Annotated[
        int | None,
        Option(min=BATCHES, metavar="N", help="Items accepted.", show_default="400000; 40000 if quick"),
    ] = None,
    batches: Annotated[
        str | None,
        Option(
            metavar="DIR|postgresql://…", help="A folder on the disk to measure with, or an empty database."
        ),
    ] = None,
) -> None:
    """How fast batches are accepted and fed, and what many of them cost in memory.

    What was measured goes to stderr. The result is the last line of stdout, as JSON.
    """
    count = items or (40_000 if quick else 400_000)
    carry_out(lambda show: run(count, batches, show), json)


if __name__ == "__main__":
    sys.exit(commands.run(main, "sglang-fair bench batches"))
