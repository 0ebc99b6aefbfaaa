"""`/v1/files` and `/v1/batches`, asked by the official client and by those who do not keep to it."""

import asyncio
import json
import resource
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from router.batches.model import Ending, Item
from router.gateway.access.identity import HEADER_FEEDER, HEADER_ON_BEHALF, Identity
from router.gateway.app import App, Config, create_app
from router.gateway.batches import upload as uploads
from router.gateway.batches.files import Files
from router.gateway.counters import Counters
from router.gateway.errors import ApiError
from sglang_fair.common.identity import DEFAULT_ORDER
from sglang_fair.tenants import edit, keys
from sglang_fair.tenants.model import Tenant
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
        self.app: App = create_app(Config(("tcp://127.0.0.1:17999",), MODEL, str(tokenizer), **config))
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://gateway")

    @property
    def files(self) -> Files:
        """What the gateway keeps."""
        [route] = [one for one in self.app.pages.routes if getattr(one, "name", "") == "upload"]
        found: Files = route.endpoint.__self__._files  # type: ignore[attr-defined]
        return found

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


def run(tmp_path: Path, tokenizer: Path, body: Callable[[Asked], Awaitable[None]], **config: Any) -> None:
    async def main() -> None:
        asked = Asked(tmp_path, tokenizer, **config)
        try:
            await body(asked)
        finally:
            await asked.http.aclose()
            asked.files.close()

    asyncio.run(main())


def lines(*custom_ids: str) -> bytes:
    return b"".join(json.dumps(LINE | {"custom_id": one}).encode() + b"\n" for one in custom_ids)


async def uploaded(client: openai.AsyncOpenAI, content: bytes) -> str:
    return (await client.files.create(file=("in.jsonl", content), purpose="batch")).id


def test_files_by_the_official_client(tmp_path: Path, tokenizer: Path) -> None:
    async def body(asked: Asked) -> None:
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

    run(tmp_path, tokenizer, body)


def test_files_are_listed_in_pages(tmp_path: Path, tokenizer: Path) -> None:
    async def body(asked: Asked) -> None:
        client = asked.client(GOLD)
        names = [await uploaded(client, b"%d" % index) for index in range(5)]
        assert [one.id async for one in client.files.list(limit=2)] == names[::-1]
        assert [one.id async for one in client.files.list(limit=2, order="asc")] == names
        assert [one.id async for one in client.files.list(purpose="batch_output")] == []

    run(tmp_path, tokenizer, body)


def test_nobody_sees_what_is_another_clients(tmp_path: Path, tokenizer: Path) -> None:
    async def body(asked: Asked) -> None:
        gold, silver = asked.client(GOLD), asked.client(SILVER)
        name = await uploaded(gold, lines("a"))
        batch = await gold.batches.create(
            input_file_id=name, endpoint="/v1/completions", completion_window="24h"
        )
        tries: list[Callable[[], Awaitable[Any]]] = [
            lambda: silver.files.retrieve(name),
            lambda: silver.files.content(name),
            lambda: silver.files.delete(name),
            lambda: silver.batches.retrieve(batch.id),
            lambda: silver.batches.cancel(batch.id),
            lambda: silver.batches.create(
                input_file_id=name, endpoint="/v1/completions", completion_window="24h"
            ),
            lambda: _first(silver.files.list(after=name)),
            lambda: _first(silver.batches.list(after=batch.id)),
        ]
        for one in tries:
            with pytest.raises(openai.NotFoundError):
                await one()
        assert [one async for one in silver.files.list()] == []
        assert [one async for one in silver.batches.list()] == []
        assert (await gold.batches.retrieve(batch.id)).status == "validating"

    run(tmp_path, tokenizer, body)


async def _first(found: Any) -> Any:
    return await found


def test_batches_by_the_official_client(tmp_path: Path, tokenizer: Path) -> None:
    async def body(asked: Asked) -> None:
        client, store = asked.client(GOLD), asked.files.store
        name = await uploaded(client, lines("a", "b"))
        batch = await client.batches.create(
            input_file_id=name,
            endpoint="/v1/completions",
            completion_window="10m",  # type: ignore[arg-type]
            metadata={"night": "1"},
        )
        assert (batch.status, batch.completion_window, batch.metadata) == (
            "validating",
            "10m",
            {"night": "1"},
        )
        assert batch.expires_at == batch.created_at + 600
        with pytest.raises(openai.ConflictError):  # it is being read
            await client.files.delete(name)
        store.accept(batch.id, [Item(1, "a", MODEL, b"{}"), Item(2, "b", MODEL, b"{}")])
        store.start(batch.id, 7)
        store.finish([Ending(batch.id, 1, True, b'{"custom_id":"a"}')], 8)
        found = await client.batches.retrieve(batch.id)
        assert found.request_counts is not None
        assert (found.status, found.request_counts.total, found.request_counts.completed) == (
            "in_progress",
            2,
            1,
        )
        store.finish([Ending(batch.id, 2, False, b'{"custom_id":"b"}')], 9)
        found = await client.batches.retrieve(batch.id)
        assert (found.status, found.completed_at) == ("completed", 9)
        assert found.output_file_id is not None
        assert found.error_file_id is not None
        assert (await client.files.content(found.output_file_id)).text == '{"custom_id":"a"}\n'
        assert (await client.files.content(found.error_file_id)).text == '{"custom_id":"b"}\n'
        assert [one.id async for one in client.batches.list(limit=1)] == [batch.id]
        with pytest.raises(openai.ConflictError):
            await client.batches.cancel(batch.id)

    run(tmp_path, tokenizer, body)


def test_a_batch_is_cancelled(tmp_path: Path, tokenizer: Path) -> None:
    async def body(asked: Asked) -> None:
        client = asked.client(GOLD)
        name = await uploaded(client, lines("a"))
        batch = await client.batches.create(
            input_file_id=name, endpoint="/v1/completions", completion_window="24h"
        )
        assert (await client.batches.cancel(batch.id)).status == "cancelling"
        assert (await client.batches.cancel(batch.id)).status == "cancelling"

    run(tmp_path, tokenizer, body)


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
def test_what_is_no_batch_is_refused(
    tmp_path: Path, tokenizer: Path, asked_for: dict[str, Any], status: int
) -> None:
    async def body(asked: Asked) -> None:
        name = await uploaded(asked.client(GOLD), lines("a"))
        batch = {"input_file_id": name, "endpoint": "/v1/completions", "completion_window": "24h"} | asked_for
        answer = await asked.http.post("/v1/batches", json=batch, headers={"x-fair-client": GOLD})
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["message"]

    run(tmp_path, tokenizer, body)


FORM = {"content-type": "multipart/form-data; boundary=x"}


def part(name: str, content: bytes, filename: str | None = None) -> bytes:
    more = "" if filename is None else f'; filename="{filename}"'
    return f'--x\r\ncontent-disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + content + b"\r\n"


WHOLE = part("purpose", b"batch") + part("file", b"{}", "a") + b"--x--\r\n"


@pytest.mark.parametrize(
    ("headers", "content", "status", "code"),
    [
        ({}, WHOLE, 400, "invalid_form"),
        ({"content-type": "multipart/form-data"}, WHOLE, 400, "invalid_form"),
        (FORM, b"what?", 400, "invalid_form"),
        (FORM, WHOLE[:-8], 400, "invalid_form"),
        (FORM, part("purpose", b"batch") + b"--x--\r\n", 400, "missing_file"),
        (FORM, part("file", b"{}", "a") + b"--x--\r\n", 400, "invalid_purpose"),
        (
            FORM,
            part("purpose", b"fine-tune") + part("file", b"{}", "a") + b"--x--\r\n",
            400,
            "invalid_purpose",
        ),
        (FORM, part("more", b"") + WHOLE, 400, "invalid_form"),
        (FORM, part("file", b"", "a") + WHOLE, 400, "invalid_form"),
        (FORM, part("purpose", b"b" * 2000) + WHOLE, 400, "invalid_form"),
        (FORM, part("expires_after[seconds]", b"1") + WHOLE, 400, "invalid_expiry"),
        (
            FORM,
            part("purpose", b"batch") + part("file", b"x" * 2001, "a") + b"--x--\r\n",
            413,
            "file_too_large",
        ),
        (FORM, part("purpose", b"batch") + part("file", b"x" * 99_999, "a"), 413, "file_too_large"),
        (FORM, WHOLE, 200, ""),
        (FORM, part("expires_after[seconds]", b"3600") + WHOLE, 200, ""),
    ],
)
def test_what_is_no_upload_leaves_nothing_behind(
    tmp_path: Path, tokenizer: Path, headers: dict[str, str], content: bytes, status: int, code: str
) -> None:
    async def body(asked: Asked) -> None:
        answer = await asked.http.post("/v1/files", content=content, headers=headers)
        assert answer.status_code == status, answer.text
        if code:
            assert answer.json()["error"]["code"] == code
        assert len(asked.kept()) == (status == 200)

    run(tmp_path, tokenizer, body, batch_file_bytes=2000)


def test_a_client_has_so_many_bytes(tmp_path: Path, tokenizer: Path) -> None:
    async def body(asked: Asked) -> None:
        gold = asked.client(GOLD)
        first = await uploaded(gold, b"x" * 900)
        with pytest.raises(openai.APIStatusError) as caught:
            await uploaded(gold, b"x" * 101)
        assert (caught.value.status_code, caught.value.code) == (413, "too_many_bytes")
        await uploaded(asked.client(SILVER), b"x" * 900)
        await gold.files.delete(first)
        await uploaded(gold, b"x" * 1000)
        assert len(asked.kept()) == 2

    run(tmp_path, tokenizer, body, batch_client_bytes=1000)


@contextmanager
def full_disk(most_bytes: int) -> Any:
    """No file of this process can grow beyond that."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_503_and_nothing_is_accepted(tmp_path: Path, tokenizer: Path) -> None:
    async def body(asked: Asked) -> None:
        client = asked.client(GOLD)
        name = await uploaded(client, lines("a"))
        with full_disk(1 << 20):
            with pytest.raises(openai.InternalServerError) as caught:
                await uploaded(client, b"x" * (3 << 20))
            assert (caught.value.status_code, caught.value.code) == (503, "disk_full")
        assert asked.kept() == [name]
        asked.files.store._db.execute("PRAGMA max_page_count = 1")  # type: ignore[attr-defined]

        async def fill() -> None:
            for _ in range(200):
                await client.batches.create(
                    input_file_id=name, endpoint="/v1/completions", completion_window="24h",
                    metadata={str(index): "x" * 500 for index in range(16)},
                )  # fmt: skip

        with pytest.raises(openai.InternalServerError):
            await fill()
        asked.files.store._db.execute("PRAGMA max_page_count = 1000000")  # type: ignore[attr-defined]
        found = len(asked.files.store.open_batches())
        await client.batches.create(input_file_id=name, endpoint="/v1/completions", completion_window="24h")
        assert len(asked.files.store.open_batches()) == found + 1

    run(tmp_path, tokenizer, body)


def test_a_large_file_goes_to_the_disk_in_pieces(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in memory at a time is bounded, and others have their turn while it comes."""
    most = 0
    flush = uploads.Upload._flush

    async def watched(self: uploads.Upload) -> None:
        nonlocal most
        most = max(most, self._pending_bytes)
        await flush(self)

    monkeypatch.setattr(uploads.Upload, "_flush", watched)

    async def body(asked: Asked) -> None:
        pieces, piece, turns = 200, b"x" * 300_000, 0

        async def content() -> Any:
            yield part("purpose", b"batch") + part("file", b"", "a")[:-2]
            for _ in range(pieces):
                yield piece
            yield b"\r\n--x--\r\n"

        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(others())
        answer = await asked.http.post("/v1/files", content=content(), headers=FORM)
        task.cancel()
        assert answer.json()["bytes"] == pieces * len(piece)
        assert most < 2 * uploads.PIECE_BYTES
        assert turns > pieces * len(piece) / uploads.PARSED_BYTES / 2

    run(tmp_path, tokenizer, body)


def test_with_tenants_a_key_is_needed(tmp_path: Path, tokenizer: Path) -> None:
    path = tmp_path / "tenants.yaml"
    for name in (GOLD, SILVER):
        edit.add(path, name, Tenant(keys=[keys.written(keys.digest(name))], models=[f"{MODEL}:x"]))

    async def body(asked: Asked) -> None:
        for method, url in (("GET", "/v1/files"), ("POST", "/v1/files"), ("GET", "/v1/batches/b")):
            assert (await asked.http.request(method, url)).status_code == 401
        name = await uploaded(asked.client(GOLD), lines("a"))
        batch = await asked.client(GOLD).batches.create(
            input_file_id=name, endpoint="/v1/completions", completion_window="24h"
        )
        [kept] = asked.files.store.open_batches()
        assert (kept.id, kept.client, kept.allowed) == (batch.id, GOLD, (f"{MODEL}:x",))
        with pytest.raises(openai.NotFoundError):
            await asked.client(SILVER).files.retrieve(name)

    run(tmp_path, tokenizer, body, tenants=str(path))


def test_without_the_option_there_are_no_batches(tmp_path: Path, tokenizer: Path) -> None:
    app = create_app(Config(("tcp://127.0.0.1:17999",), MODEL, str(tokenizer)))
    assert not [path for path in app.pages.openapi()["paths"] if "files" in path or "batches" in path]


# ---- the feeder's key


@pytest.mark.parametrize("order", [DEFAULT_ORDER, ("user",)])
def test_only_the_feeder_asks_on_behalf_of_others(order: tuple[str, ...]) -> None:
    identity = Identity(order, Counters(), feeder_key="secret")
    told = {HEADER_FEEDER: "secret", HEADER_ON_BEHALF: GOLD, "x-fair-client": SILVER}
    assert identity.of(told, None).caller.client == GOLD
    assert identity.of(told, None, user="somebody").caller.client == GOLD
    for wrong in ("", "Secret", "secre", "\udc80"):
        with pytest.raises(ApiError) as caught:
            identity.of(told | {HEADER_FEEDER: wrong}, None)
        assert caught.value.status == 401
    with pytest.raises(ApiError):
        identity.of({HEADER_FEEDER: "secret"}, None)


def test_without_a_key_nobody_is_the_feeder() -> None:
    identity = Identity(DEFAULT_ORDER, Counters())
    for given in ("", "x"):
        told = {HEADER_FEEDER: given, HEADER_ON_BEHALF: GOLD, "x-fair-client": SILVER}
        assert identity.of(told, None).caller.client == SILVER


# ---- the command


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
