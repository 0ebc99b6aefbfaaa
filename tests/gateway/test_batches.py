"""`/v1/files` and `/v1/batches`, asked by the official client and by those who do not keep to it."""

import asyncio
import json
import resource
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import openai
import pytest

from router.batches import folder
from router.batches.model import BatchIssue, Ending, Item
from router.gateway.access.identity import HEADER_FEEDER, HEADER_ON_BEHALF, HEADER_STANDS_FOR, Identity
from router.gateway.app import App, create_app
from router.gateway.batches import upload as uploads
from router.gateway.batches.routes import Batches
from router.gateway.errors import ApiError
from sglang_fair.common.identity import DEFAULT_ORDER
from sglang_fair.tenants import edit, keys
from sglang_fair.tenants.model import Tenant
from tests.batches.test_store import limit_pages
from tests.gateway.clusters import gateway_settings
from tests.support.stand_in import MODEL

GOLD, SILVER = "gold", "silver"
LINE = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/completions",
    "body": {"model": MODEL, "prompt": "hello", "max_tokens": 3},
}


class Asked:
    """A gateway that is asked without a socket."""

    def __init__(self, folder: Path, tokenizer: Path, **config: Any) -> None:
        config = {"batches": str(folder / "kept"), **config}
        self.folder = folder / "kept"
        self.app: App = create_app(gateway_settings("tcp://127.0.0.1:17999", tokenizer, **config))
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://gateway")

    @property
    def files(self) -> Batches:
        """What the gateway keeps."""
        assert self.app.batches is not None
        return self.app.batches

    def client(self, name: str) -> openai.AsyncOpenAI:
        """OpenAI's client, for whom the gateway is the API."""
        return openai.AsyncOpenAI(
            api_key=name,
            base_url="http://gateway/v1",
            http_client=self.http,
            max_retries=0,
            default_headers={"x-fair-client": name},
        )

    def kept(self) -> list[str]:
        """Uploads on the disk."""
        return sorted(path.name for path in (self.folder / "files").iterdir())


@pytest.fixture
def asked(
    tmp_path: Path, tokenizer: Path, runner: asyncio.Runner, options: dict[str, Any]
) -> Iterator[Asked]:
    made = Asked(tmp_path, tokenizer, **options)
    yield made
    runner.run(made.http.aclose())
    made.files.close()


def lines(*custom_ids: str) -> bytes:
    return b"".join(json.dumps(LINE | {"custom_id": one}).encode() + b"\n" for one in custom_ids)


async def uploaded(client: openai.AsyncOpenAI, content: bytes) -> str:
    return (await client.files.create(file=("in.jsonl", content), purpose="batch")).id


async def created(client: openai.AsyncOpenAI, name: str, window: Any = "24h", **more: Any) -> Any:
    """A batch of the file `name`."""
    return await client.batches.create(
        input_file_id=name, endpoint="/v1/completions", completion_window=window, **more
    )


async def test_files_by_the_official_client(asked: Asked) -> None:
    client, content = asked.client(GOLD), lines("a", "b") * 5000
    made = await client.files.create(file=("my requests.jsonl", content), purpose="batch")
    assert (made.bytes, made.filename, made.purpose, made.status) == (
        len(content), "my requests.jsonl", "batch", "processed",
    )  # fmt: skip
    assert made.expires_at == made.created_at + 30 * 86_400
    assert await client.files.retrieve(made.id) == made
    assert (await client.files.content(made.id)).content == content
    assert [one.id async for one in client.files.list()] == [made.id]
    assert (await client.files.delete(made.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(made.id)
    assert asked.kept() == []


async def test_files_are_listed_in_pages(asked: Asked) -> None:
    client = asked.client(GOLD)
    names = [await uploaded(client, b"%d" % index) for index in range(5)]
    assert [one.id async for one in client.files.list(limit=2)] == names[::-1]
    assert [one.id async for one in client.files.list(limit=2, order="asc")] == names
    assert [one.id async for one in client.files.list(purpose="batch_output")] == []


async def test_nobody_sees_what_is_another_clients(asked: Asked) -> None:
    async def first(found: Any) -> Any:
        return await found

    gold, silver = asked.client(GOLD), asked.client(SILVER)
    name = await uploaded(gold, lines("a"))
    batch = await created(gold, name)
    tries: list[Callable[[], Awaitable[Any]]] = [
        lambda: silver.files.retrieve(name),
        lambda: silver.files.content(name),
        lambda: silver.files.delete(name),
        lambda: silver.batches.retrieve(batch.id),
        lambda: silver.batches.cancel(batch.id),
        lambda: created(silver, name),
        lambda: first(silver.files.list(after=name)),
        lambda: first(silver.batches.list(after=batch.id)),
    ]
    for one in tries:
        with pytest.raises(openai.NotFoundError):
            await one()
    assert [one async for one in silver.files.list()] == []
    assert [one async for one in silver.batches.list()] == []
    assert (await gold.batches.retrieve(batch.id)).status == "validating"


async def test_batches_by_the_official_client(asked: Asked) -> None:
    client, store = asked.client(GOLD), asked.files.store
    name = await uploaded(client, lines("a", "b"))
    batch = await created(client, name, "10m", metadata={"night": "1"})
    said = (batch.status, batch.completion_window, batch.metadata, batch.expires_at - batch.created_at)
    assert said == ("validating", "10m", {"night": "1"}, 600)
    with pytest.raises(openai.ConflictError):  # it is being read
        await client.files.delete(name)
    store.claim("f", ())
    store.accept(batch.id, "f", [Item(1, "a", MODEL, b"{}"), Item(2, "b", MODEL, b"{}")])
    store.settle(batch.id, "f", (), 7)
    store.finish([Ending(batch.id, 1, True, b'{"custom_id":"a"}')], 8)
    found = await client.batches.retrieve(batch.id)
    counts = found.request_counts
    assert counts is not None
    assert (found.status, counts.total, counts.completed) == ("in_progress", 2, 1)
    store.finish([Ending(batch.id, 2, False, b'{"custom_id":"b"}')], 9)
    found = await client.batches.retrieve(batch.id)
    assert (found.status, found.completed_at) == ("completed", 9)
    for file_id, text in ((found.output_file_id, "a"), (found.error_file_id, "b")):
        assert file_id is not None
        assert (await client.files.content(file_id)).text == f'{{"custom_id":"{text}"}}\n'
    assert [one.id async for one in client.batches.list(limit=1)] == [batch.id]
    with pytest.raises(openai.ConflictError):
        await client.batches.cancel(batch.id)
    other = await created(client, await uploaded(client, lines("a")))
    for _ in range(2):
        assert (await client.batches.cancel(other.id)).status == "cancelling"
    wrong = await created(client, name)
    store.claim("f", ())
    store.settle(wrong.id, "f", [BatchIssue("missing_body", "body is missing", 3)], 7)
    found = await client.batches.retrieve(wrong.id)
    assert found.errors is not None
    [issue] = found.errors.data or ()
    assert (found.status, issue.code, issue.line, issue.param) == ("failed", "missing_body", 3, None)


@pytest.mark.parametrize(
    ("asked_for", "status"),
    [
        ({"completion_window": "24 h"}, 400),
        ({"completion_window": "8d"}, 400),
        ({"completion_window": "0s"}, 400),
        ({"completion_window": "24h\n"}, 400),
        ({"endpoint": "/v1/embeddings"}, 400),
        ({"metadata": {"a" * 65: "b"}}, 400),
        ({"metadata": {str(index): "b" for index in range(17)}}, 400),
        ({"input_file_id": "file-unknown"}, 404),
        ({"surprise": 1}, 400),
        ({"endpoint": None}, 400),
    ],
)
async def test_what_is_no_batch_is_refused(asked_for: dict[str, Any], status: int, asked: Asked) -> None:
    name = await uploaded(asked.client(GOLD), lines("a"))
    batch = {"input_file_id": name, "endpoint": "/v1/completions", "completion_window": "24h"} | asked_for
    answer = await asked.http.post("/v1/batches", json=batch, headers={"x-fair-client": GOLD})
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]


FORM = {"content-type": "multipart/form-data; boundary=x"}


def part(name: str, content: bytes, filename: str | None = None) -> bytes:
    more = "" if filename is None else f'; filename="{filename}"'
    return f'--x\r\ncontent-disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + content + b"\r\n"


END = b"--x--\r\n"
WHOLE = part("purpose", b"batch") + part("file", b"{}", "a") + END


@pytest.mark.parametrize(
    ("content", "status", "code"),
    [
        (b"what?", 400, "invalid_form"),
        (WHOLE[:-8], 400, "invalid_form"),
        (part("purpose", b"batch") + END, 400, "missing_file"),
        (part("file", b"{}", "a") + END, 400, "invalid_purpose"),
        (part("purpose", b"fine-tune") + part("file", b"{}", "a") + END, 400, "invalid_purpose"),
        (part("more", b"") + WHOLE, 400, "invalid_form"),
        (part("file", b"", "a") + WHOLE, 400, "invalid_form"),
        (part("purpose", b"b" * 2000) + WHOLE, 400, "invalid_form"),
        (part("expires_after[seconds]", b"1") + WHOLE, 400, "invalid_expiry"),
        (part("purpose", b"batch") + part("file", b"x" * 2001, "a") + END, 413, "file_too_large"),
        (part("purpose", b"batch") + part("file", b"x" * 99_999, "a"), 413, "file_too_large"),
        (WHOLE, 200, ""),
        (part("expires_after[seconds]", b"3600") + WHOLE, 200, ""),
    ],
)
@pytest.mark.cluster(batch_file_bytes=2000)
async def test_what_is_no_upload_leaves_nothing_behind(
    content: bytes, status: int, code: str, asked: Asked
) -> None:
    answer = await asked.http.post("/v1/files", content=content, headers=FORM)
    assert answer.status_code == status, answer.text
    if code:
        assert answer.json()["error"]["code"] == code
    assert len(asked.kept()) == (status == 200)


async def test_what_is_no_form_is_no_upload(asked: Asked) -> None:
    for headers in ({}, {"content-type": "multipart/form-data"}):
        answer = await asked.http.post("/v1/files", content=WHOLE, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_form")
    assert asked.kept() == []


@pytest.mark.cluster(batch_client_bytes=1000)
async def test_a_client_has_so_many_bytes(asked: Asked) -> None:
    gold = asked.client(GOLD)
    first = await uploaded(gold, b"x" * 900)
    with pytest.raises(openai.APIStatusError) as caught:
        await uploaded(gold, b"x" * 101)
    assert (caught.value.status_code, caught.value.code) == (413, "too_many_bytes")
    await uploaded(asked.client(SILVER), b"x" * 900)
    await gold.files.delete(first)
    await uploaded(gold, b"x" * 1000)
    assert len(asked.kept()) == 2


@contextmanager
def full_disk(most_bytes: int) -> Any:
    """No file of this process can grow beyond that."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


async def test_a_full_disk_is_503_and_nothing_is_accepted(asked: Asked) -> None:
    client, store = asked.client(GOLD), asked.files.store
    name = await uploaded(client, lines("a"))
    with full_disk(1 << 20):
        with pytest.raises(openai.InternalServerError) as caught:
            await uploaded(client, b"x" * (3 << 20))
        assert (caught.value.status_code, caught.value.code) == (503, "disk_full")
    assert asked.kept() == [name]
    pages = limit_pages(store, 0)

    async def fill() -> None:
        for _ in range(200):
            await created(client, name, metadata={str(index): "x" * 500 for index in range(16)})

    with pytest.raises(openai.InternalServerError):
        await fill()
    limit_pages(store, pages + 1000)
    found = len(store.open_batches())
    await created(client, name)
    assert len(store.open_batches()) == found + 1


async def test_a_large_file_goes_to_the_disk_in_pieces(monkeypatch: pytest.MonkeyPatch, asked: Asked) -> None:
    """What is in memory at a time is bounded, and others have their turn while it comes."""
    pieces, piece = 60, b"x" * 300_000
    held, turns = [0], [0]
    flush = uploads.Spool.seek

    async def watched(self: uploads.Spool, offset: int) -> None:
        held.append(len(self.pending))
        await flush(self, offset)

    async def content() -> Any:
        yield part("purpose", b"batch") + part("file", b"", "a")[:-2]
        for _ in range(pieces):
            yield piece
        yield b"\r\n--x--\r\n"

    async def others() -> None:
        while True:
            turns[0] += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(uploads.Spool, "seek", watched)
    task = asyncio.create_task(others())
    answer = await asked.http.post("/v1/files", content=content(), headers=FORM)
    task.cancel()
    assert answer.json()["bytes"] == pieces * len(piece)
    assert 0 < max(held) < 2 * folder.PIECE_BYTES
    assert turns[0] > pieces * len(piece) / uploads.PARSED_BYTES / 2


@pytest.fixture
def tenants(tmp_path: Path) -> str:
    path = tmp_path / "tenants.yaml"
    for name in (GOLD, SILVER):
        edit.add(path, name, Tenant(keys=[keys.written(keys.digest(name))], models=[f"{MODEL}:x"]))
    return str(path)


async def test_with_tenants_a_key_is_needed(tenants: str, asked: Asked) -> None:
    for method, url in (("GET", "/v1/files"), ("POST", "/v1/files"), ("GET", "/v1/batches/b")):
        assert (await asked.http.request(method, url)).status_code == 401
    name = await uploaded(asked.client(GOLD), lines("a"))
    batch = await created(asked.client(GOLD), name)
    [kept] = asked.files.store.open_batches()
    assert (kept.id, kept.client, kept.allowed) == (batch.id, GOLD, (f"{MODEL}:x",))
    with pytest.raises(openai.NotFoundError):
        await asked.client(SILVER).files.retrieve(name)


def test_without_the_option_there_are_no_batches(tmp_path: Path, tokenizer: Path) -> None:
    app = create_app(gateway_settings("tcp://127.0.0.1:17999", tokenizer))
    assert not [path for path in app.pages.openapi()["paths"] if "files" in path or "batches" in path]


# ---- the feeder's key


@pytest.mark.parametrize("order", [DEFAULT_ORDER, ("user",)])
def test_only_the_feeder_asks_on_behalf_of_others(order: tuple[str, ...]) -> None:
    identity = Identity(order, Mock(), feeder_key="secret")
    told = {HEADER_FEEDER: "secret", HEADER_ON_BEHALF: GOLD, "x-fair-client": SILVER}
    assert identity.of(told, None).caller.client == GOLD
    assert identity.of(told, None, user="somebody").caller.client == GOLD
    for text, count in (("7", 7), ("0", 1), ("-3", 1), ("9" * 10, 1), ("\u0663", 1)):
        assert identity.of(told | {HEADER_STANDS_FOR: text}, None).stands_for == count
    assert identity.of({"x-fair-client": SILVER, HEADER_STANDS_FOR: "7"}, None).stands_for == 1
    for wrong in ("", "Secret", "secre", "\udc80"):
        with pytest.raises(ApiError) as caught:
            identity.of(told | {HEADER_FEEDER: wrong}, None)
        assert caught.value.status == 401
    with pytest.raises(ApiError):
        identity.of({HEADER_FEEDER: "secret"}, None)


def test_without_a_key_nobody_is_the_feeder() -> None:
    identity = Identity(DEFAULT_ORDER, Mock())
    for given in ("", "x"):
        told = {HEADER_FEEDER: given, HEADER_ON_BEHALF: GOLD, "x-fair-client": SILVER}
        assert identity.of(told, None).caller.client == SILVER


# ---- the command


@pytest.mark.slow
def test_a_damaged_database_is_one_line(tmp_path: Path, tokenizer: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "batches.db").write_bytes(b"no database at all" * 1000)
    done = subprocess.run(
        [
            sys.executable, "-m", "router.gateway", "--port", "0", "--router", "tcp://127.0.0.1:17999",
            "--model-name", MODEL, "--tokenizer", str(tokenizer), "--batches", str(kept),
        ],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    [line] = [one for one in done.stderr.splitlines() if "--batches" in one]
    assert "batches.db" in line
    assert "Traceback" not in done.stderr
