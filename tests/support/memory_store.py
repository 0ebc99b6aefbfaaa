"""A store in memory: the contract in the fewest words, what the stores are compared with."""

from collections.abc import Mapping, Sequence

import msgspec

from router.batches.changes import cancelled, closed, closing, ended, failed, is_ending, moved
from router.batches.contract import FileInUse, StoreError
from router.batches.model import ClientTotals, Ending, Issue, Item, Part, Purpose, StoredBatch, StoredFile


class MemoryStore:
    """`contract.Store`."""

    def __init__(self) -> None:
        self._files: dict[str, StoredFile] = {}
        self._batches: dict[str, StoredBatch] = {}
        self._items: dict[str, dict[int, Item]] = {}
        """Of each batch, all that were accepted."""
        self._endings: dict[str, dict[int, Ending]] = {}

    def add_file(self, file: StoredFile) -> None:
        self._files[file.id] = file

    def file(self, client: str, name: str) -> StoredFile | None:
        file = self._files.get(name)
        return file if file is not None and file.client == client else None

    def files(
        self, client: str, *, purpose: Purpose | None, after: str | None, limit: int, newest_first: bool
    ) -> list[StoredFile] | None:
        found = [file for file in self._files.values() if file.client == client]
        ids = [file.id for file in found]
        if after is not None and after not in ids:
            return None
        if newest_first:
            found.reverse()
            ids.reverse()
        if after is not None:
            found = found[ids.index(after) + 1 :]
        return [file for file in found if purpose in (None, file.purpose)][:limit]

    def file_bytes(self, client: str) -> int:
        return sum(
            one.bytes for one in self._files.values() if one.client == client and one.purpose == "batch"
        )

    def remove_file(self, client: str, name: str) -> bool:
        file = self.file(client, name)
        if file is None:
            return False
        if self._is_read(name):
            raise FileInUse("a batch that is being validated still reads the file")
        self._forget(file)
        return True

    def results(self, file: StoredFile, after: int, most_bytes: int) -> tuple[bytes, int | None]:
        found, last = b"", after
        for number, one in sorted(self._endings[file.batch].items()):
            if number <= after or one.is_ok != (file.results == "output"):
                continue
            if len(found) >= most_bytes:
                return found, last
            found, last = found + one.line + b"\n", number
        return found, None

    def add_batch(self, batch: StoredBatch) -> None:
        self._batches[batch.id] = batch
        self._items[batch.id], self._endings[batch.id] = {}, {}

    def batch(self, client: str, name: str) -> StoredBatch | None:
        batch = self._batches.get(name)
        return batch if batch is not None and batch.client == client else None

    def batches(self, client: str, *, after: str | None, limit: int) -> list[StoredBatch] | None:
        found = [batch for batch in reversed(self._batches.values()) if batch.client == client]
        ids = [batch.id for batch in found]
        if after is not None and after not in ids:
            return None
        return found[0 if after is None else ids.index(after) + 1 :][:limit]

    def cancel(self, client: str, name: str, now_s: int) -> StoredBatch | None:
        batch = self.batch(client, name)
        if batch is None:
            return None
        self._batches[name] = cancelled(batch, now_s)
        return self._batches[name]

    def open_batches(self) -> list[StoredBatch]:
        return [batch for batch in self._batches.values() if not batch.is_over]

    def forget_items(self, batch: str) -> None:
        self._items[batch], self._endings[batch] = {}, {}
        self._count(batch)

    def accept(self, batch: str, items: Sequence[Item]) -> bool:
        if not self._is_validating(batch):
            return False
        if {one.number for one in items} & self._items[batch].keys():
            raise StoreError("an item is accepted twice")
        self._items[batch] |= {one.number: one for one in items}
        self._count(batch)
        return True

    def start(self, batch: str, now_s: int) -> bool:
        if not self._is_validating(batch):
            return False
        self._batches[batch] = moved(self._batches[batch], "in_progress", now_s)
        return True

    def fail(self, batch: str, issues: Sequence[Issue], now_s: int) -> bool:
        if not self._is_validating(batch):
            return False
        self.forget_items(batch)
        self._batches[batch] = failed(self._batches[batch], issues, now_s)
        return True

    def parts(self) -> list[Part]:
        found = []
        for batch in self._batches.values():
            left = self._left(batch.id) if batch.status == "in_progress" else []
            for model in sorted({one.model for one in left}):
                of = [one for one in left if one.model == model]
                tokens = sum(one.prompt_tokens for one in of), sum(one.output_tokens for one in of)
                found.append(Part(batch.id, model, len(of), *tokens))
        return found

    def items(self, batch: str, model: str, after: int, limit: int) -> list[Item]:
        return [one for one in self._left(batch) if one.model == model and one.number > after][:limit]

    def tried(self, batch: str, tries: Mapping[int, int]) -> None:
        for one in self._left(batch):
            if one.number in tries:
                self._items[batch][one.number] = msgspec.structs.replace(one, tries=tries[one.number])

    def finish(self, endings: Sequence[Ending], now_s: int) -> int:
        count = 0
        for one in endings:
            done = self._endings.get(one.batch)
            if done is None or self._batches[one.batch].is_over:
                continue
            if one.number in self._items[one.batch] and one.number not in done:
                done[one.number] = one
                count += 1
        for batch in {one.batch for one in endings} & self._batches.keys():
            self._end_if_over(batch, now_s)
        return count

    def close(self, batch: str, now_s: int, most: int) -> bool:
        found = self._batches[batch]
        if found.is_over:
            return True
        found = self._batches[batch] = closing(found, now_s)
        self.finish([closed(found, one.number, one.custom_id) for one in self._left(batch)[:most]], now_s)
        self._end_if_over(batch, now_s)
        return self._batches[batch].is_over

    def totals(self) -> Mapping[str, ClientTotals]:
        found: dict[str, ClientTotals] = {}
        for batch in self._batches.values():
            if batch.status != "failed":
                of = found.setdefault(batch.client, ClientTotals())
                of.left += batch.left
                of.completed += batch.completed
                of.failed += batch.failed
        return found

    def sweep(self, now_s: int, ended_before_s: int) -> list[str]:
        old = [
            file
            for file in self._files.values()
            if file.expires_s is not None and file.expires_s <= now_s and not self._is_read(file.id)
        ]
        for file in old:
            self._forget(file)
        for batch in list(self._batches.values()):
            if batch.is_over and max(batch.times.values(), default=batch.created_s) < ended_before_s:
                for kept in (self._batches, self._items, self._endings):
                    del kept[batch.id]
                self._files = {name: file for name, file in self._files.items() if file.batch != batch.id}
        return [file.id for file in old]

    def uploaded(self) -> set[str]:
        return {file.id for file in self._files.values() if file.purpose == "batch"}

    def check(self) -> None: ...

    def shut(self) -> None: ...

    # -- inside

    def _is_read(self, name: str) -> bool:
        return any(one.input_file == name and one.status == "validating" for one in self._batches.values())

    def _forget(self, file: StoredFile) -> None:
        if file.results:
            endings = self._endings[file.batch]
            kept = {number: one for number, one in endings.items() if one.is_ok != (file.results == "output")}
            self._endings[file.batch] = kept
        del self._files[file.id]

    def _is_validating(self, batch: str) -> bool:
        found = self._batches.get(batch)
        return found is not None and found.status == "validating"

    def _left(self, batch: str) -> list[Item]:
        done = self._endings[batch]
        return [one for number, one in sorted(self._items[batch].items()) if number not in done]

    def _count(self, batch: str) -> None:
        done = [one.is_ok for one in self._endings[batch].values()]
        self._batches[batch] = msgspec.structs.replace(
            self._batches[batch],
            total=len(self._items[batch]),
            completed=sum(done),
            failed=len(done) - sum(done),
        )

    def _end_if_over(self, batch: str, now_s: int) -> None:
        if self._batches[batch].is_over:
            return
        self._count(batch)
        found = self._batches[batch]
        if is_ending(found):
            sizes = [0, 0]
            for one in self._endings[batch].values():
                sizes[one.is_ok] += len(one.line) + 1
            self._batches[batch], files = ended(found, sizes[1], sizes[0], now_s)
            self._files |= {file.id: file for file in files}
