"""How fast batches are taken in, accepted and written down, and what many of them cost in memory.

    sglang-fair bench batches [--quick] [--json FILE] [--folder DIR]

Everything runs in one process, on the code of gateway, store and feeder, in a folder on the disk that is measured with.

* upload_mb_per_s: a file as a client sends it, from the pieces of its form to the disk, synced. loop_stall_ms_max: how
  long the event loop was busy in one go meanwhile, at most; others wait so long. loop_stall_ms_p99: of all its turns.
* accept_per_s: lines read, checked and committed, in commits of 500. results_per_s: results written with the ends of
  their items, in commits of 500.
* feeder_mib: what Python allocates when a feeder looks at all these items, and has begun with each batch.
  rows: what a router hears of them. look_ms: one look at the store.
"""

import asyncio
import shutil
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

from router.batches.blobs import Blobs
from router.batches.contract import Store
from router.batches.folder import open_blobs, open_store
from router.batches.model import Ending, StoredBatch
from router.feeder.core import Feeder, Load
from router.feeder.intake import COMMIT_ITEMS, Validation
from router.gateway.batches.upload import Upload
from sglang_fair.bench import Show, carry_out
from sglang_fair.bench.router import quantile
from sglang_fair.common.deadlines import DEFAULT_CLASSES
from sglang_fair.common.provenance import machine
from sglang_fair.settings import commands
from sglang_fair.settings.commands import Option

PIECE_BYTES = 64 << 10
"""As a socket brings them."""
BOUNDARY = b"bench"
BATCHES = 40
CLIENTS = 20
PROMPT = "word " * 60
RESULT = b"x" * 800
NOW_S = 1_000_000
WINDOW_S = 86_400


def a_line(number: int) -> bytes:
    """A request of 60 words."""
    return (
        b'{"custom_id": "request-%d", "method": "POST", "url": "/v1/completions", "body": '
        b'{"model": "tiny", "prompt": "%d %s", "max_tokens": 64}}\n' % (number, number, PROMPT.encode())
    )


def a_form(content_bytes: int) -> Iterator[bytes]:
    """The body of an upload of a file of about that size, in pieces."""
    yield b'--%s\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n' % BOUNDARY
    yield b'--%s\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n' % BOUNDARY
    lines = b"".join(a_line(number) for number in range(2_000))
    left = content_bytes
    while left > 0:
        for start in range(0, len(lines), PIECE_BYTES):
            yield lines[start : start + PIECE_BYTES]
        left -= len(lines)
    yield b"\r\n--%s--\r\n" % BOUNDARY


async def measure_upload(blobs: Blobs, content_bytes: int) -> dict[str, float]:
    """One upload, beside a task that notes how long it had to wait for its turn."""
    stalls: list[float] = []

    async def watch() -> None:
        while True:
            before_s = time.perf_counter()
            await asyncio.sleep(0)
            stalls.append(1e3 * (time.perf_counter() - before_s))

    form = a_form(content_bytes)

    async def receive() -> bytes | None:
        await asyncio.sleep(0)
        return next(form, None)

    writing = blobs.create("upload")
    upload = Upload(
        {"content-type": f"multipart/form-data; boundary={BOUNDARY.decode()}"},
        writing,
        1 << 40,
        asyncio.to_thread,
    )
    began_s = time.perf_counter()
    watching = asyncio.create_task(watch())
    await upload.read(receive)
    await asyncio.to_thread(writing.keep)
    took_s = time.perf_counter() - began_s
    watching.cancel()
    size = writing.bytes
    writing.drop()
    return {
        "upload_mb": round(size / 1e6, 1),
        "upload_mb_per_s": round(size / 1e6 / took_s, 1),
        "loop_stall_ms_p99": round(quantile(stalls, 0.99), 3),
        "loop_stall_ms_max": round(max(stalls), 3),
    }


def a_batch(number: int) -> StoredBatch:
    """One of a client's."""
    return StoredBatch(
        id=f"batch_{number}",
        client=f"client {number % CLIENTS}",
        endpoint="/v1/completions",
        input_file="input",
        window="24h",
        created_s=NOW_S,
        expires_s=NOW_S + WINDOW_S,
        models=("tiny",),
    )


def accept(store: Store, blobs: Blobs, items: int) -> float:
    """Items accepted a second, in `BATCHES` batches of one file."""
    each = items // BATCHES
    writing = blobs.create("input")
    writing.write(b"".join(map(a_line, range(each))))
    writing.keep()
    took_s = 0.0
    for number in range(BATCHES):
        batch = a_batch(number)
        store.add_batch(batch)
        validation = Validation(store, blobs, batch, items, 1 << 24)
        began_s = time.perf_counter()
        while not validation.step(NOW_S):
            pass
        took_s += time.perf_counter() - began_s
    return each * BATCHES / took_s


def measure_feeder(store: Store) -> dict[str, float]:
    """A feeder that begins with all that there is."""
    tracemalloc.start()
    feeder = Feeder(DEFAULT_CLASSES, 128)
    feeder.replicas({"": 4})
    began_s = time.perf_counter()
    actions = feeder.look(store.open_batches(), store.parts(), NOW_S)
    look_ms = 1e3 * (time.perf_counter() - began_s)
    for action in actions:
        if isinstance(action, Load):
            feeder.loaded(action, store.items(*action.key, action.after, action.limit), NOW_S)
    rows = feeder.backlog(NOW_S, 1 << 20)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {
        "look_ms": round(look_ms, 2),
        "rows": len(rows),
        "items_in_rows": sum(row.waiting + row.running for row in rows),
        "feeder_mib": round(held / (1 << 20), 2),
    }


def finish(store: Store, items: int) -> float:
    """Results written a second."""
    each = items // BATCHES
    began_s, count = time.perf_counter(), 0
    for batch in range(BATCHES):
        for first in range(1, each + 1, COMMIT_ITEMS):
            numbers = range(first, min(first + COMMIT_ITEMS, each + 1))
            endings = [Ending(f"batch_{batch}", number, True, RESULT) for number in numbers]
            count += store.finish(endings, NOW_S)
    return count / (time.perf_counter() - began_s)


def run(items: int, upload_bytes: int, folder: Path | None, show: Show) -> dict[str, Any]:
    """Measures everything, in a folder that is made and taken away."""
    place = Path(tempfile.mkdtemp(prefix="bench-batches-", dir=folder))
    try:
        store, blobs = open_store(place), open_blobs(place)
        upload = asyncio.run(measure_upload(blobs, upload_bytes))
        show(f"upload: {upload['upload_mb_per_s']} MB/s, loop busy {upload['loop_stall_ms_max']} ms at most")
        accepted = accept(store, blobs, items)
        show(f"{items:,} items accepted: {accepted:,.0f} a second")
        feeder = measure_feeder(store)
        show(
            f"the feeder: {feeder['rows']} rows, {feeder['feeder_mib']} MiB more, a look {feeder['look_ms']} ms"
        )
        finished = finish(store, items)
        show(f"results: {finished:,.0f} a second")
        store.shut()
    finally:
        shutil.rmtree(place)
    return {
        "bench": "batches",
        "versions": {"sglang-fair": version("sglang-fair")},
        "machine": machine(),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "items": items,
        **upload,
        "accept_per_s": round(accepted),
        "results_per_s": round(finished),
        **feeder,
    }


def main(
    json: Annotated[Path | None, Option(metavar="FILE", help="Write the last line to FILE too.")] = None,
    quick: Annotated[bool, Option("--quick", help="A tenth of the items and of the upload.")] = False,
    items: Annotated[
        int | None,
        Option(min=BATCHES, metavar="N", help="Items accepted.", show_default="400000; 40000 if quick"),
    ] = None,
    folder: Annotated[
        Path | None,
        Option(
            metavar="DIR",
            help="On the disk to measure with.",
            show_default="the system's for temporary files",
        ),
    ] = None,
) -> None:
    """How fast batches are taken in, accepted and written down, and what many of them cost in memory.

    What was measured goes to stderr. The result is the last line of stdout, as JSON.
    """
    count = items or (40_000 if quick else 400_000)
    upload_bytes = (100 if quick else 1000) * 1_000_000
    carry_out(lambda show: run(count, upload_bytes, folder, show), json)


if __name__ == "__main__":
    sys.exit(commands.run(main, "sglang-fair bench batches"))
