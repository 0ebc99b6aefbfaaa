"""Feeders over a store, with no gateway and no clock: what is between them is a test's to decide."""

import json
from pathlib import Path
from uuid import uuid4

import sqlalchemy as sa

from router.batches.model import Ending, Item, StoredBatch
from router.batches.store import Store
from router.feeder.answers import Again, Answer
from router.feeder.core import Feeder, Send

CLASSES = {"interactive": 20.0, "batch-1": 60.0, "batch-2": 3600.0}
NOW_S = 1_000_000
LEASE_S = 10.0
OK = Answer(200, b'{"choices": []}')


def quick_store(path: Path) -> Store:
    """SQLite that does not wait for the disk: here nothing pulls the plug."""
    store = Store(path)
    sa.event.listen(store._db, "connect", lambda db, _: db.execute("PRAGMA synchronous = OFF"))
    store._db.dispose()
    return store


class One:
    """A feeder, and what it has in hand."""

    def __init__(self, world: "World", most_in_flight: int, token_s: float | None) -> None:
        self.world, self.store, self.owner = world, world.store, uuid4().hex
        self.core = Feeder(CLASSES, most_in_flight, token_s)
        self.sent: dict[int, tuple[Send, int]] = {}
        """By key, each with its tries."""
        self.put_off: dict[int, tuple[float, Send, int]] = {}
        self.endings: list[Ending] = []
        self.released: set[int] = set()
        self.closing: list[str] = []
        self.is_sure = True

    def look(self) -> None:
        now_s = self.world.now_s
        self.store.renew(self.owner, now_s + LEASE_S)
        self.store.reclaim(now_s)
        gone, close = self.core.look(self.store.open_batches(), self.store.leased(), now_s)
        for key in gone:
            self.sent.pop(key, None)
            self.put_off.pop(key, None)
        self.closing += close

    def turn(self, *, leases: bool = True, is_heard: bool = True) -> None:
        """What comes of it may get lost on the way back."""
        for key, (until_s, send, tries) in list(self.put_off.items()):
            if until_s <= self.world.now_s:
                del self.put_off[key]
                self.sent[key] = send, tries
        wanted, most_bytes = self.core.wanted(self.world.now_s) if leases else ({}, 0)
        self.store.renew(self.owner, self.world.now_s + LEASE_S)
        found = self.store.turn(
            self.owner, int(self.world.now_s), self.endings, released=self.released,
            keep=None if self.is_sure else self.core.keys, wanted=wanted, most_bytes=most_bytes,
        )  # fmt: skip
        self.is_sure = is_heard
        if not is_heard:
            return
        self.core.unwritten -= len(self.endings)
        self.endings = []
        sends, lost = self.core.leased(wanted, found)
        self.released = {*lost}
        for send in sends:
            assert send.item.key not in self.sent, "it is in flight already"
            self.sent[send.item.key] = send, send.item.tries

    def write(self) -> None:
        self.turn(leases=False)

    def answer(self, key: int, answer: Answer) -> None:
        send, tries = self.sent.pop(key)
        match self.core.answered(send, answer, tries, self.world.now_s):
            case Again(after_s, _, counts):
                if counts:
                    tries += 1
                    self.store.turn(self.owner, int(self.world.now_s), tries={key: tries})
                self.put_off[key] = self.world.now_s + after_s, send, tries
            case None:
                self.released.add(key)
            case ending:
                self.endings.append(ending)

    def close(self, most: int = 3) -> None:
        if self.store.close(self.closing[0], int(self.world.now_s), most):
            self.core.closed(self.closing.pop(0))


class World:
    """A store and its feeders."""

    def __init__(
        self, store: Store, feeders: int = 1, most_in_flight: int = 8, token_s: float | None = None
    ) -> None:
        self.store, self.now_s = store, float(NOW_S)
        self._most, self._token_s = most_in_flight, token_s
        self.accepted: dict[str, tuple[str, int]] = {}
        """Client and number of items, by batch."""
        self.feeders = [One(self, most_in_flight, token_s) for _ in range(feeders)]

    @property
    def one(self) -> One:
        return self.feeders[0]

    def die(self, index: int = 0) -> None:
        """What it had in hand is lost, and a feeder that knows nothing begins."""
        self.feeders[index] = One(self, self._most, self._token_s)

    def add(
        self,
        name: str,
        client: str,
        items: int,
        window: str = "1h",
        models: tuple[str, ...] = ("m",),
        is_whole: bool = True,
    ) -> None:
        """A batch that runs, if it `is_whole`."""
        seconds = {"1s": 1, "10s": 10, "1h": 3600}[window]
        self.store.add_batch(
            StoredBatch(
                id=name, client=client, endpoint="/v1/completions", input_file_id="f", completion_window=window,
                created_at=int(self.now_s), expires_at=int(self.now_s) + seconds, models=models,
            )
        )  # fmt: skip
        self.store.claim("intake", ())
        made = [Item(n, f"id {n}", models[n % len(models)], b"{}") for n in range(1, items + 1)]
        self.store.accept(name, "intake", made)
        if is_whole:
            self.store.settle(name, "intake", (), int(self.now_s))
        self.accepted[name] = client, items

    def finish(self) -> None:
        """All goes well from here on."""
        for _ in range(10_000):
            self.now_s += 0.5
            for one in self.feeders:
                one.look()
                one.turn()
                for key in list(one.sent):
                    one.answer(key, OK)
                one.write()
                while one.closing:
                    one.close(100)
            if not self.store.open_batches():
                return
        raise AssertionError(f"it does not end: {self.store.open_batches()}")

    def lines(self, name: str) -> list[str]:
        """The custom ids in both files of a batch."""
        client, found = self.accepted[name][0], []
        batch = self.store.batch(client, name)
        assert batch is not None
        for file_id in filter(None, (batch.output_file_id, batch.error_file_id)):
            file = self.store.file(client, file_id)
            assert file is not None
            content, _ = self.store.results(file, 0, 1 << 30)
            found += [json.loads(line)["custom_id"] for line in content.splitlines()]
        return found
